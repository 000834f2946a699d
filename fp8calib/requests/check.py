"""The request of `fp8calib check`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.engines.registry import find_replayed, list_defaults, list_replayed
from fp8calib.options.option import Option
from fp8calib.requests import shared


def _check_engines(names: str) -> None:
    for name in names.split(","):
        find_replayed(name.strip())


@dataclass(frozen=True, slots=True)
class CheckRequest:
    """Report what each engine will do with KV scales and FP8 weights, without running it.

    Exit code 0 only if every layer gets the scales that the file means; 8 if one does not, 9 if
    nothing is wrong but something is unknown. A checkpoint without KV scales that asks for none is
    ok, unless --require-kv is given.

    Example: fp8calib check out/kv-overlay --engine vllm
    """

    path: Annotated[
        str | Path,
        Option(
            metavar="PATH",
            reads=Path,
            check=shared.require_input("name a checkpoint folder or a JSON file"),
            help="A checkpoint folder or hub id, or a JSON file of any tool.",
        ),
    ]
    _: KW_ONLY
    engine: Annotated[
        str | Sequence[str] | None,
        Option(
            "--engine",
            metavar="NAME[==VERSION]",
            reads=list[str],
            check=_check_engines,
            help=f"{', '.join(list_replayed())}; default {', '.join(list_defaults())}.",
        ),
    ] = None
    tp: Annotated[
        int, Option("--tp", metavar="N", least=1, help="Tensor-parallel degree; default 1.")
    ] = 1
    model: Annotated[
        str | Path | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The model the scales are for; for files.",
        ),
    ] = None
    require_kv: Annotated[
        bool,
        Option("--require-kv", help="Fail if the checkpoint has no KV scales and asks for none."),
    ] = False
    allow_suspicious: Annotated[
        bool,
        Option(
            "--allow-suspicious",
            help="Accept scales that are most likely wrong, such as one 1000 times the median.",
        ),
    ] = False
    stats: Annotated[
        shared.Stats | None,
        Option(
            "--stats",
            metavar="FILE",
            reads=Path,
            check=shared.check_stats,
            help="What calibrate measured: scales that are far from it fail, such as reciprocals.",
        ),
    ] = None
