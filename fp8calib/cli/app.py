"""The program's commands. Importing this pays for typer alone; bodies import what they need."""

from __future__ import annotations

from typing import Annotated

import typer

from fp8calib import __version__
from fp8calib.cli.calibrate.command import calibrate_command
from fp8calib.cli.check.command import check_command
from fp8calib.cli.export.command import export_command
from fp8calib.cli.extract.command import extract_command
from fp8calib.cli.merge.command import merge_command
from fp8calib.cli.quantize.command import quantize_command
from fp8calib.cli.recipes import recipes_command
from fp8calib.cli.show.command import show_command
from fp8calib.cli.verify.command import verify_command

app = typer.Typer(
    name="fp8calib",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="FP8 calibration of Hugging Face language models: scales that engines really load.",
)
app.command("calibrate")(calibrate_command)
app.command("export")(export_command)
app.command("extract-kv-scales")(extract_command)
app.command("check")(check_command)
app.command("verify")(verify_command)
app.command("quantize")(quantize_command)
app.command("merge")(merge_command)
app.command("show")(show_command)
app.command("recipes")(recipes_command)


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
