"""The commands of the program, made of requests. A command imports what runs it when it starts."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import MISSING, fields
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from fp8calib import __version__
from fp8calib.cli.console import (
    ConsoleReporter,
    print_json,
    prints_json,
    set_json,
    show,
    sign_of_life,
    warn,
)
from fp8calib.cli.setup import quiet_libraries, refuse_missing
from fp8calib.requests.auto import AutoRequest
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.requests.card import CardRequest
from fp8calib.requests.check import CheckRequest
from fp8calib.requests.engine_env import EngineEnvRequest
from fp8calib.requests.export import ExportRequest
from fp8calib.requests.extract import ExtractRequest
from fp8calib.requests.merge import MergeRequest
from fp8calib.requests.options import Option
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.requests.recipes import RecipesRequest
from fp8calib.requests.shared import StatsLike
from fp8calib.requests.show import ShowRequest
from fp8calib.requests.verify import VerifyRequest

if TYPE_CHECKING:
    from fp8calib.blocks import Block
    from fp8calib.commands.function import Reporter
    from fp8calib.results.record import Result

_JSON = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; messages go to stderr.")
]
HELP_NAMES = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    name="fp8calib",
    context_settings=HELP_NAMES,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="FP8 calibration of Hugging Face language models: scales that engines really load.",
)


class _Command(TyperCommand):
    """A command that warns of options given several times, of which the last one counts."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _, _, given = self.make_parser(ctx).parse_args(args=list(args))
        for option, times in Counter(given).items():
            is_single = isinstance(option, TyperOption) and not (option.multiple or option.is_flag)
            if is_single and times > 1:
                warn(f"{option.opts[0]} is given {times} times: only the last one counts")
        return super().parse_args(ctx, args)


@contextmanager
def _heavy_imports() -> Iterator[None]:
    """Keep the garbage collector from scanning the objects that an import creates.

    There are nearly a million of them, and they live until the end. The collector would scan them
    many times during the import and once more at exit. Without that, a calibration of one sequence
    takes 3.5 s instead of 5.0 s. Nothing changes if torch is imported already.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()


_COMMANDS: Mapping[str, tuple[type, str]] = {
    "calibrate": (CalibrateRequest, "calibrate.run:run_calibrate"),
    "export": (ExportRequest, "export.run:run_export"),
    "extract-kv-scales": (ExtractRequest, "extract:run_extract"),
    "check": (CheckRequest, ""),
    "engine-env": (EngineEnvRequest, ""),
    "verify": (VerifyRequest, "verify.run:run_verify"),
    "quantize": (QuantizeRequest, "quantize.run:run_quantize"),
    "auto": (AutoRequest, "auto.run:run_auto_command"),
    "card": (CardRequest, ""),
    "merge": (MergeRequest, "merge:run_merge"),
    "show": (ShowRequest, ""),
    "recipes": (RecipesRequest, ""),
}
"""What each command is asked. The module of its name in `fp8calib.commands` runs it, and that in
`fp8calib.render` describes the result; or else a function below `fp8calib.cli` does both."""
_PARSED: Mapping[Any, Any] = {
    str | Path: Path,
    str | Path | None: str | None,
    StatsLike | None: Path | None,
    Sequence[str | Path]: list[Path],
    Sequence[str | Path] | None: list[Path] | None,
    str | Sequence[str] | None: list[str] | None,
}
"""What the parser reads where a function of Python takes more."""
_STARTS_AT_ONCE = frozenset({"recipes"})
"""The commands that import no torch."""


def _register(name: str, request: type, place: str) -> None:
    """Make a command of a request, whose docstring is its help."""

    def command(json: bool, **options: Any) -> int | KeyboardInterrupt | None:
        set_json(json)
        given = request(**options)
        refuse_missing(given)
        try:
            with nullcontext() if name in _STARTS_AT_ONCE else sign_of_life():
                with _heavy_imports():
                    run = _find(name, place)
                return run(given)
        except KeyboardInterrupt as interruption:  # the parser would make a number of it
            return interruption

    command.__signature__ = _derive_signature(request)  # type: ignore[attr-defined]
    text = inspect.getdoc(request) or ""
    app.command(
        name,
        cls=_Command,
        context_settings=HELP_NAMES,
        help=text,
        short_help=text.partition("\n")[0],  # or else the list of --help cuts the sentences
    )(command)


def _find(name: str, place: str) -> Callable[[Any], int | None]:
    """Import what runs a command."""
    if place:
        module, _, function = place.partition(":")
        found: Callable[[Any], int | None] = getattr(
            import_module(f"fp8calib.cli.{module}"), function
        )
        return found
    module = name.replace("-", "_")
    run = import_module(f"fp8calib.commands.{module}").run
    describe = import_module(f"fp8calib.render.{module}").describe
    return partial(_run_and_show, run, describe)


def _run_and_show(
    run: Callable[[Any, Reporter], Result],
    describe: Callable[[Any, Any], Iterable[Block]],
    request: Any,
) -> int:
    """Run a command, print its result and return its exit code."""
    quiet_libraries()
    result = run(request, ConsoleReporter())
    if prints_json():
        for option in _list_layout(request):
            warn(f"--json prints everything: {option} has no effect")
        print_json(result.to_json())
    show(describe(result, request))
    return result.exit_code


def _list_layout(request: Any) -> Iterator[str]:
    """List the options that were given and only choose what a terminal shows."""
    hints = get_type_hints(type(request), include_extras=True)
    for field in fields(request):
        option: Option = get_args(hints[field.name])[1]
        if option.is_layout and getattr(request, field.name) != field.default:
            yield option.flags


def _derive_signature(request: type) -> inspect.Signature:
    """Make parameters of a request's fields, and add --json."""
    hints = get_type_hints(request, include_extras=True)
    parameters = []
    for field in fields(request):
        value, option = get_args(hints[field.name])
        value = _PARSED.get(value, value)
        made = _make_parameter(option, field.default_factory)
        default = inspect.Parameter.empty if field.default is MISSING else field.default
        parameters.append(_make_keyword(field.name, Annotated[value, made], default))
    return inspect.Signature([*parameters, _make_keyword("json", _JSON, False)])


def _make_keyword(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    kind = inspect.Parameter.KEYWORD_ONLY
    return inspect.Parameter(name, kind, default=default, annotation=annotation)


def _make_parameter(option: Option, factory: Any) -> Any:
    """Make an option or an argument of typer; a default that the help names is not shown twice."""
    if not option.flags:
        return typer.Argument(metavar=option.metavar, help=option.help, show_default=False)
    return typer.Option(
        *option.flags.split(),
        metavar=option.metavar,
        help=option.help,
        min=option.least,
        max=option.most,
        parser=option.parser,
        show_default="default" not in option.help.lower() and factory is MISSING,
        default_factory=None if factory is MISSING else factory,
    )


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


for _name, (_request, _place) in _COMMANDS.items():
    _register(_name, _request, _place)
