"""What a command prints that fails."""

from __future__ import annotations

from typing import Literal

from fp8calib.overview import Overview
from fp8calib.results.record import Record, Result


class Failure(Record):
    """What failed and where, and what to do."""

    kind: Literal[
        "usage", "recipe", "model", "data", "calibration", "export", "verification", "server", "bug"
    ]
    message: str
    hint: str


class ErrorResult(Result):
    """The error of a command."""

    error: Failure

    @property
    def passed(self) -> bool:
        """Nothing passed."""
        return False

    def overview(self) -> Overview:
        """Give the message and the hint."""
        return Overview(f"error: {self.error.message}", notes=[f"hint: {self.error.hint}"])
