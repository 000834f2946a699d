"""The request of `fp8calib merge`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import require_path
from fp8calib.options.option import Option


@dataclass(frozen=True, slots=True)
class MergeRequest:
    """Join the statistics of all shards of a calibration.

    Example: fp8calib merge one/stats.safetensors two/stats.safetensors --out stats.safetensors
    """

    shards: Annotated[
        Sequence[str | Path],
        Option(
            metavar="STATS...",
            reads=list[Path],
            check=partial(
                require_path, hint="name the output folder of a shard, or its stats.safetensors"
            ),
            help="stats.safetensors of every shard, or its output folder.",
        ),
    ]
    out: Annotated[str | Path, Option("--out", metavar="STATS", reads=Path, help="Output file.")]
    _: KW_ONLY
    force: Annotated[bool, Option("--force", help="Replace older statistics.")] = False
