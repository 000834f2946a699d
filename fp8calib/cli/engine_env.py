"""`fp8calib engine-env`: make an environment with an engine, and print its Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import JsonOption


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEnvSettings:
    """The command line."""

    engine: Annotated[
        str, typer.Argument(metavar="ENGINE==VERSION", help="Such as vllm==0.32, for CPU.")
    ]
    folder: Annotated[
        Path | None,
        typer.Option("--dir", metavar="DIR", help="Where environments are kept; default a cache."),
    ] = None
    as_json: JsonOption = False


def run_engine_env(settings: EngineEnvSettings) -> None:
    """Make the environment, or find it, and print the path of its Python."""
    from fp8calib.api.engine_env import make_engine_env  # noqa: PLC0415
    from fp8calib.cli.console import print_json, print_text, say  # noqa: PLC0415

    python = make_engine_env(settings.engine, settings.folder, tell=say)
    if settings.as_json:
        print_json({"python": str(python)})
    else:
        print_text(str(python))
