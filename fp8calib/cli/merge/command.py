"""The options of `fp8calib merge`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import JsonOption


def merge_command(
    stats: Annotated[
        list[Path],
        typer.Argument(
            metavar="STATS...",
            help="stats.safetensors of every shard, or its output folder.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="STATS", help="Output file.")],
    as_json: JsonOption = False,
) -> None:
    """Join the statistics of all shards of a calibration.

    Example: fp8calib merge one/stats.safetensors two/stats.safetensors --out stats.safetensors
    """
    from fp8calib.cli.merge.run import run_merge  # noqa: PLC0415

    run_merge(stats, out, as_json=as_json)
