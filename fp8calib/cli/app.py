"""The commands of the program, made of requests. A command imports what runs it when it starts."""

from __future__ import annotations

import inspect
import os
import sys
import textwrap
from collections.abc import Iterable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from fp8calib import __version__
from fp8calib.cli.console import (
    ConsoleReporter,
    print_json,
    print_table,
    print_text,
    say,
    show_error,
    warn,
)
from fp8calib.commands import find_module, find_request, spell_commands, summarize_command
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Option, list_options
from fp8calib.errors import UsageError
from fp8calib.machine import find_process_rank
from fp8calib.plugin import find_plugins
from fp8calib.text import Answer, Block, Line

if TYPE_CHECKING:
    from fp8calib.commands.result import Result

_JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; messages go to stderr.")
]
_KEYWORD = inspect.Parameter.KEYWORD_ONLY
HELP_NAMES = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_GROUPS = {
    "Arguments": (),
    "Model": ("quantized_model", "model", "revision", "trust_remote_code", "other_weights"),
    "Text": (
        "data",
        "text_column",
        "strict_rows",
        "samples",
        "seq_len",
        "pack",
        "seed",
        "show_text",
    ),
    "Options": (),
    "Output": (
        *("out", "report", "dump", "formats", "dialect", "force", "check", "everything", "json"),
        *("dry_run", "resume", "shard", "help"),
    ),
    "Machine": ("device", "dtype", "device_map", "memory", "batch_size"),
}
"""The options in each part of a command's help, by their names in Python; others are `Options`."""
_COMPARED = {"scales", "gate"}
"""The other options of a command that has one of these are about candidates."""


class _Command(TyperCommand):
    """A command whose help has its options by what they are about."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; of an option that takes one value, the parser keeps the last."""
        from fp8calib.commands.options import spread_formats  # noqa: PLC0415 -- imports engines

        typed = [word.partition("=")[0] for word in args if word.startswith("--")]
        for each in self.params:
            given = [word for word in typed if word in each.opts]
            if len(given) > 1 and not (
                getattr(each, "multiple", False) or getattr(each, "is_flag", False)
            ):
                warn(f"{given[1]} takes one value: the last one counts")
        return super().parse_args(ctx, spread_formats(args))

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, and the options by what they are about."""
        place = {name: title for title, names in _GROUPS.items() for name in names}
        rows: dict[str, list[tuple[str, str]]] = {title: [] for title in _GROUPS}
        params = self.get_params(ctx)
        for each in params:
            is_argument = each.param_type_name == "argument"
            title = "Arguments" if is_argument else place.get(each.name or "", "Options")
            if (row := each.get_help_record(ctx)) is not None:
                term = row[0]
                for alias in [flag for flag in each.opts if flag.startswith("--")][1:]:
                    term = term.replace(f", {alias}", "")
                rows[title].append((term, row[1]))
        formatter.write("\n")
        width = formatter.width + 2  # click leaves two columns free
        compares = not _COMPARED.isdisjoint(each.name for each in params)
        for title, found in rows.items():
            if found:
                is_about_candidates = title == "Options" and compares
                formatter.write(f"{'Candidates' if is_about_candidates else title}:\n")
                for term, text in found:
                    formatter.write(_format_row(term, text, width))


_TERM_WIDTH = 24
_LONGEST_TERM = 72
"""After a longer one, which has many choices, the text begins on the next line."""


def _format_row(term: str, text: str, width: int) -> str:
    """Write an option and its text, which begins after the option where that is long."""
    first = f"  {term}  ".ljust(_TERM_WIDTH)
    rest = " " * _TERM_WIDTH
    own = "" if len(first) <= _LONGEST_TERM else f"{first.rstrip()}\n"
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=rest if own else first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
    return own + "\n".join(lines) + "\n"


class _Group(TyperGroup):
    """The program, or a group of commands in it; it imports the request of the one that runs."""

    def __init__(
        self, name: str | None = None, requests: Mapping[str, str] | None = None, **settings: Any
    ) -> None:
        super().__init__(name=name, **settings)
        self._is_program = requests is None
        self._requests = spell_commands() if requests is None else requests
        names = (typed.partition(" ")[0] for typed in self._requests)
        self.commands = dict.fromkeys(names)  # type: ignore[assignment] # made when asked for

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        """Make a command, or a group such as `vllm`; until then only names are known."""
        if cmd_name in self._requests:
            return _make_command(self._requests[cmd_name], cmd_name)
        before = f"{cmd_name} "
        inner = {
            typed.removeprefix(before): place
            for typed, place in self._requests.items()
            if typed.startswith(before)
        }
        if not inner:
            return None
        return _Group(cmd_name, inner, context_settings=HELP_NAMES, rich_markup_mode=None)

    def format_commands(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        """Write the first line of every command's help, whose request is not imported."""
        with formatter.section("Commands"):
            formatter.write_dl(
                [(typed, summarize_command(n)) for typed, n in self._requests.items()]
            )
        if self._is_program and (faults := find_plugins()[1]):
            with formatter.section("Plug-ins that cannot be used"):
                for fault in faults:
                    formatter.write_text(fault)


app = typer.Typer(
    name="fp8calib",
    cls=_Group,
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="FP8 calibration of Hugging Face language models: scales that engines really load.",
)


@cache
def _make_command(name: str, typed: str) -> Any:
    """Make a command of a request, whose docstring is its help."""
    request = find_request(name)
    declared = [each for each in list_options(request) if each.spelling]

    names_first = sorted(declared, key=lambda each: "Path" in each.type)

    def command(json: bool, **options: Any) -> int | KeyboardInterrupt | None:
        given = request(**{each.name: each.read(options[each.name]) for each in declared})
        if hasattr(given, "on_command_line"):
            given = given.on_command_line()
        for each in names_first:
            each.check_value(getattr(given, each.name))
        try:
            return _run(name, given, as_json=json)
        except KeyboardInterrupt as interruption:  # the parser would make a number of it
            return interruption

    json = inspect.Parameter("json", _KEYWORD, default=False, annotation=_JSON)
    command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [*map(_make_parameter, declared), json]
    )
    text = inspect.getdoc(request) or ""
    alone = typer.Typer(rich_markup_mode=None, add_completion=False)
    alone.command(
        typed,
        cls=_Command,
        context_settings=HELP_NAMES,
        help=text,
        short_help=text.partition("\n")[0],  # else cut where a shell completes the name
    )(command)
    return get_command(alone)


def _run(name: str, request: Any, *, as_json: bool) -> int:
    """Run a command, and print its result as its `describe` describes it."""
    if "torch" not in sys.modules:
        say("loading libraries")
    with slow_imports():
        implementation: Any = find_module(name)
    # no progress bars and messages of transformers, which may not be imported yet
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    if "transformers" in sys.modules:
        from transformers.utils import logging  # noqa: PLC0415

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    try:
        with ConsoleReporter() as reporter:
            run, rank = implementation.run, find_process_rank(os.environ)
            runs_in_several = "process_rank" in inspect.signature(run).parameters
            if rank.size > 1 and not runs_in_several:
                raise UsageError(
                    f"{rank.size} processes were started, and this command runs in one",
                    hint="start it without torchrun",
                )
            more = {"process_rank": rank} if runs_in_several else {}
            result: Result | None = run(request, reporter, **more)
    except Exception as error:
        if hasattr(error, "result"):  # found before its files could not be written
            _show(name, error.result, request, as_json=as_json)
        raise
    if result is None:  # the first of several processes has it
        return 0
    if as_json:
        print_json(result.to_json())
    _show(name, result, request, as_json=as_json)
    if failure := getattr(result, "failure", ""):
        return show_error("", failure, "", result.exit_code, as_json=False)
    return result.exit_code


def _show(name: str, result: Result, request: Any, *, as_json: bool) -> None:
    """Print a result as the module of its command describes it; beside JSON, only its answer."""
    from fp8calib.commands.result import RunPlan  # noqa: PLC0415 -- imports pydantic

    blocks: Iterable[Block]
    if isinstance(result, RunPlan):
        blocks = result.describe()
    elif (render := find_module(name, "describe")) is not None:
        blocks = render.describe(result, request)
    else:
        blocks = [Line(str(result))]
    for block in blocks:
        if as_json:  # stdout has it
            if isinstance(block, Answer):
                say(block.text)
        elif isinstance(block, Line):
            print_text(block.text)
        else:
            print_table(block.title, block.columns, [list(map(str, row)) for row in block.rows])


def _make_parameter(option: Option) -> inspect.Parameter:
    """Make an option or an argument of typer; a default that the help names is not shown twice."""
    if not option.flags:
        made: Any = typer.Argument(metavar=option.value, help=option.help)
    else:
        made = typer.Option(
            *option.flags,
            metavar=option.value or None,
            help=option.help,
            min=option.least,
            max=option.most,
            show_default="default" not in option.help.lower(),
        )
    default = False if option.negates else option.default
    value: Any = option.reads or option.annotation
    annotation = Annotated[value, made]
    return inspect.Parameter(option.name, _KEYWORD, default=default, annotation=annotation)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"fp8calib {__version__}")
        raise typer.Exit


@app.callback()
def _program(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    pass
