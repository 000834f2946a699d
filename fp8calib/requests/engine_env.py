"""The request of `fp8calib engine-env`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.options.option import Option


@dataclass(frozen=True, slots=True)
class EngineEnvRequest:
    """Make an environment with an engine for `check --run`, and print the path of its Python.

    Example: fp8calib engine-env vllm==0.32
    """

    engine: Annotated[str, Option(metavar="ENGINE==VERSION", help="Such as vllm==0.32, for CPU.")]
    folder: Annotated[
        str | Path | None,
        Option(
            "--dir", metavar="DIR", reads=Path, help="Where environments are kept; default a cache."
        ),
    ] = None
