"""`fp8calib check`: what engines do with the KV scales of a checkpoint or file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import JsonOption
from fp8calib.engines.registry import list_defaults, list_replayed


def check_command(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint folder or hub id, or a JSON file of any tool."
        ),
    ],
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME",
            help=f"{', '.join(list_replayed())}; default {', '.join(list_defaults())}.",
        ),
    ] = None,
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", min=1, help="Tensor-parallel degree; default 1.")
    ] = 1,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model the scales are for; for files."),
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Report what each engine will do with every layer's k and v scale, without running it.

    Exit code 0 only if every attention layer gets the scale the file means, else 8.

    Example: fp8calib check out/kv-overlay --engine vllm
    """
    with heavy_imports():
        from fp8calib.cli.check.run import (  # noqa: PLC0415
            CheckSettings,
            choose_engines,
            run_check,
        )

    return run_check(
        CheckSettings(
            path=path, engines=choose_engines(engine), tp=tp, model=model, as_json=as_json
        )
    )
