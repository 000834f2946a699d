"""The request of `fp8calib show`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import require_path
from fp8calib.options.option import Option


@dataclass(frozen=True, slots=True)
class ShowRequest:
    """Print what stands out in a file of statistics or scales, or tables of it.

    Example: fp8calib show SmolLM2-135M-Instruct-fp8calib/stats.safetensors --kv
    """

    file: Annotated[
        str | Path,
        Option(
            metavar="STATS|SCALES",
            reads=Path,
            check=partial(require_path, hint="name statistics or scales"),
            help="Statistics or scales: a file (.safetensors .npz .json) or a folder.",
        ),
    ]
    _: KW_ONLY
    everything: Annotated[
        bool, Option("--all", help="Print every table instead of what stands out.", is_layout=True)
    ] = False
    kv: Annotated[bool, Option("--kv", help="Print the table of K, V and q.", is_layout=True)] = (
        False
    )
