"""The commands of the program. This module imports typer alone; each command imports its runner."""

from __future__ import annotations

import gc
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from typer.core import TyperCommand, TyperOption

from fp8calib import __version__
from fp8calib.checkpoint.locations import require_path
from fp8calib.cli.auto.settings import AutoSettings
from fp8calib.cli.calibrate.settings import CalibrateSettings
from fp8calib.cli.card.settings import CardSettings
from fp8calib.cli.check.settings import CheckSettings
from fp8calib.cli.console import sign_of_life, warn
from fp8calib.cli.engine_env import EngineEnvSettings, run_engine_env
from fp8calib.cli.export.settings import ExportSettings
from fp8calib.cli.extract.settings import ExtractSettings
from fp8calib.cli.option_types import JsonOption
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.cli.setup import refuse_missing
from fp8calib.cli.verify.settings import VerifySettings

_Settings = TypeVar("_Settings")

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


def _command(
    name: str, settings: type[_Settings]
) -> Callable[[Callable[[_Settings], int | None]], None]:
    """Register a command that takes the fields of `settings`, a dataclass, as its options."""

    def register(run: Callable[[_Settings], int | None]) -> None:
        def command(**options: Any) -> int | KeyboardInterrupt | None:
            given = settings(**options)
            refuse_missing(given)
            try:
                with sign_of_life():
                    return run(given)
            except KeyboardInterrupt as interruption:  # the parser would make a number of it
                return interruption

        command.__signature__ = inspect.signature(settings, eval_str=True)  # type: ignore[attr-defined]
        app.command(name, help=run.__doc__)(command)

    return register


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


@_command("calibrate", CalibrateSettings)
def _calibrate(settings: CalibrateSettings) -> int:
    """Run calibration text through a model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """
    with _heavy_imports():
        from fp8calib.cli.calibrate.run import run_calibrate  # noqa: PLC0415
    return run_calibrate(settings)


@_command("export", ExportSettings)
def _export(settings: ExportSettings) -> None:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """
    with _heavy_imports():
        from fp8calib.cli.export.run import run_export  # noqa: PLC0415
    run_export(settings)


@_command("extract-kv-scales", ExtractSettings)
def _extract(settings: ExtractSettings) -> None:
    """Copy the KV scales of a quantized checkpoint to its unquantized model.

    Example: fp8calib extract-kv-scales --quantized-model llama-fp8 --model llama --save-path out
    """
    with _heavy_imports():
        from fp8calib.cli.extract.run import run_extract  # noqa: PLC0415
    run_extract(settings)


@_command("check", CheckSettings)
def _check(settings: CheckSettings) -> int:
    """Report what each engine will do with KV scales and FP8 weights, without running it.

    Exit code 0 only if every layer gets the scales that the file means, else 8. A checkpoint
    without KV scales that asks for none is ok, unless --require-kv is given.

    Example: fp8calib check out/kv-overlay --engine vllm
    """
    with _heavy_imports():
        from fp8calib.cli.check.run import run_check  # noqa: PLC0415
    return run_check(settings)


@_command("engine-env", EngineEnvSettings)
def _engine_env(settings: EngineEnvSettings) -> None:
    """Make an environment with an engine for check --run, and print the path of its Python.

    Example: fp8calib engine-env vllm==0.32
    """
    run_engine_env(settings)


@_command("verify", VerifySettings)
def _verify(settings: VerifySettings) -> int:
    """Compare a model with its FP8 emulation on the same text.

    Example: fp8calib verify SmolLM2-135M-Instruct --scales SmolLM2-135M-Instruct-fp8calib
    """
    with _heavy_imports():
        from fp8calib.cli.verify.run import run_verify  # noqa: PLC0415
    return run_verify(settings)


@_command("quantize", QuantizeSettings)
def _quantize(settings: QuantizeSettings) -> None:
    """Write an FP8 checkpoint shard by shard, without loading the model.

    Example: fp8calib quantize meta-llama/Llama-3.1-8B-Instruct --scheme fp8-dynamic --out llama-fp8
    """
    with _heavy_imports():
        from fp8calib.cli.quantize.run import run_quantize  # noqa: PLC0415
    run_quantize(settings)


@_command("auto", AutoSettings)
def _auto(settings: AutoSettings) -> int:
    """Choose how a model becomes FP8 from its own figures, write it, verify and check it.

    Exit code 0 only if what was written passes the gate when it is read back; else 8, or 9 where
    there is too little text to tell.

    Example: fp8calib auto HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl --engine vllm
    """
    with _heavy_imports():
        from fp8calib.cli.auto.run import run_auto_command  # noqa: PLC0415
    return run_auto_command(settings)


@_command("card", CardSettings)
def _card(settings: CardSettings) -> None:
    """Write a model card into a folder: figures of loss, engines, commands and hashes.

    Example: fp8calib card llama-fp8/fp8-dynamic --base-model meta-llama/Llama-3.1-8B-Instruct
    """
    with _heavy_imports():
        from fp8calib.cli.card.run import run_card  # noqa: PLC0415
    run_card(settings)


@app.command("merge")
def _merge(
    stats: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATS...",
            help="stats.safetensors of every shard, or its output folder.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="STATS", help="Output file.")],
    force: Annotated[bool, typer.Option("--force", help="Replace older statistics.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Join the statistics of all shards of a calibration.

    Example: fp8calib merge one/stats.safetensors two/stats.safetensors --out stats.safetensors
    """
    for path in stats:
        require_path(path, hint="name the output folder of a shard, or its stats.safetensors")
    with sign_of_life(), _heavy_imports():
        from fp8calib.cli.merge import run_merge  # noqa: PLC0415
    run_merge(stats, out, force=force, as_json=as_json)


@app.command("show")
def _show(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="STATS|SCALES",
            help="Statistics or scales: a file (.safetensors .npz .json) or a folder.",
        ),
    ],
    everything: Annotated[
        bool, typer.Option("--all", help="Print every table instead of what stands out.")
    ] = False,
    kv: Annotated[bool, typer.Option("--kv", help="Print the table of K, V and q.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Print what stands out in a file of statistics or scales, or tables of it.

    Example: fp8calib show SmolLM2-135M-Instruct-fp8calib/stats.safetensors --kv
    """
    require_path(path, hint="name statistics or scales")
    with sign_of_life(), _heavy_imports():
        from fp8calib.cli.show.run import run_show  # noqa: PLC0415
        from fp8calib.cli.show.tables import Tables  # noqa: PLC0415
        from fp8calib.errors import UsageError  # noqa: PLC0415
    if everything and kv:
        raise UsageError("--all prints every row: leave out --kv")
    tables = Tables.ALL if everything else Tables.KV if kv else Tables.NONE
    run_show(path, tables, as_json=as_json)


@app.command("recipes")
def _recipes(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="A recipe of fp8calib, or a YAML file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the recipes, or print one and explain every key.

    Example: fp8calib recipes kv
    """
    from fp8calib.cli.recipes import run_recipes  # noqa: PLC0415

    run_recipes(name, as_json=as_json)


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


for _registered in app.registered_commands:
    _registered.cls = _Command
    _registered.context_settings = HELP_NAMES
    # without a short help, the list of --help cuts the sentences
    _text = _registered.help or inspect.getdoc(_registered.callback) or ""
    _registered.short_help = _text.partition("\n")[0]
