"""The settings of `fp8calib check`: its options, not yet resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import JsonOption
from fp8calib.engines.registry import list_defaults, list_replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings:
    """The command line."""

    path: Annotated[
        Path,
        typer.Argument(
            metavar="PATH", help="A checkpoint folder or hub id, or a JSON file of any tool."
        ),
    ]
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--engine",
            metavar="NAME[==VERSION]",
            help=f"{', '.join(list_replayed())}; default {', '.join(list_defaults())}.",
        ),
    ] = None
    tp: Annotated[
        int, typer.Option("--tp", metavar="N", min=1, help="Tensor-parallel degree; default 1.")
    ] = 1
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="MODEL", help="The model the scales are for; for files."),
    ] = None
    require_kv: Annotated[
        bool,
        typer.Option(
            "--require-kv", help="Fail if the checkpoint has no KV scales and asks for none."
        ),
    ] = False
    allow_suspicious: Annotated[
        bool,
        typer.Option(
            "--allow-suspicious",
            help="Accept scales that are most likely wrong, such as one 1000 times the others.",
        ),
    ] = False
    stats: Annotated[
        Path | None,
        typer.Option(
            "--stats",
            metavar="FILE",
            help="What calibrate measured: scales that are far from it fail, such as reciprocals.",
        ),
    ] = None
    run: Annotated[
        bool,
        typer.Option("--run", help="Load the folder with vLLM's own loader, without its weights."),
    ] = False
    engine_python: Annotated[
        Path | None,
        typer.Option(
            "--engine-python",
            metavar="PATH",
            help="The Python of an environment with vLLM for --run; default this one.",
        ),
    ] = None
    as_json: JsonOption = False
