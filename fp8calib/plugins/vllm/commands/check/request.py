"""The request of `fp8calib vllm check`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.commands import options as shared
from fp8calib.commands.option import Option


@dataclass(frozen=True, slots=True)
class VllmCheckRequest:
    """Load a checkpoint with vLLM's own loader, without its weights, and compare the replay.

    The exit code is that of `fp8calib check`.

    Example: fp8calib vllm check MODEL-FP8 --python ~/vllm/bin/python
    """

    path: Annotated[
        str | Path,
        Option(
            metavar="PATH",
            reads=Path,
            check=shared.require_input("name a checkpoint folder"),
            help="A checkpoint folder or hub id.",
        ),
    ]
    _: KW_ONLY
    python: Annotated[
        str | Path | None,
        Option(
            "--python",
            metavar="PATH",
            reads=Path,
            help="The Python of an environment with vLLM; default this one.",
        ),
    ] = None
    tp: Annotated[
        int, Option("--tp", metavar="N", least=1, help="Tensor-parallel degree; default 1.")
    ] = 1
