"""The settings of `fp8calib card`: its options, not yet resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import JsonOption


@dataclass(frozen=True, slots=True, kw_only=True)
class CardSettings:
    """The command line."""

    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="An FP8 checkpoint, an overlay, or a folder of files of KV scales."
        ),
    ]
    verify_reports: Annotated[
        list[Path] | None,
        typer.Option(
            "--verify-report",
            metavar="JSON",
            help="What `verify --json` printed about DIR; repeat for more. The report of `auto` is "
            "found in DIR or above it.",
        ),
    ] = None
    base_model: Annotated[
        str | None,
        typer.Option(
            "--base-model",
            metavar="ORG/NAME",
            help="Hub id of the unquantized model; default: the one in a report.",
        ),
    ] = None
    repo: Annotated[
        str | None,
        typer.Option(
            "--repo", metavar="ORG/NAME", help="Hub id that DIR is published under, for commands."
        ),
    ] = None
    quantized_by: Annotated[
        str | None,
        typer.Option("--quantized-by", metavar="NAME", help="Who made it, for the front matter."),
    ] = None
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The unquantized model, whose layers are checked; files of scales need it.",
        ),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Replace DIR/README.md.")] = False
    as_json: JsonOption = False
