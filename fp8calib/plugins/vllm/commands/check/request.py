"""The request of `fp8calib vllm check`."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path

from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class


@request_class
class VllmCheckRequest:
    """Load a checkpoint with vLLM's own loader, without its weights, and compare the replay.

    The exit code is that of `fp8calib check`.

    Example: fp8calib vllm check MODEL-FP8 --python ~/vllm/bin/python
    """

    path: str | Path = option(
        "PATH",
        "A checkpoint folder or hub id.",
        reads=Path,
        check=shared.require_input("name a checkpoint folder"),
    )
    _: KW_ONLY
    python: str | Path | None = option(
        "--python PATH",
        "The Python of an environment with vLLM; default this one.",
        reads=Path,
        default=None,
    )
    tp: int = option("--tp N", "Tensor-parallel degree; default 1.", least=1, default=1)
