"""What `engine-env` made."""

from __future__ import annotations

from pathlib import Path

from fp8calib.overview import Overview
from fp8calib.results.record import Result


class EngineEnvResult(Result):
    """The environment of an engine."""

    python: Path
    """Its Python."""

    def overview(self) -> Overview:
        """Name the Python."""
        return Overview(f"EngineEnvResult: {self.python}")
