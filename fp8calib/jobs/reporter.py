"""What a command says while it runs: on a console, or to a caller in Python."""

from __future__ import annotations

import sys
import warnings
from typing import Protocol

from fp8calib.calibration.progress import Progress
from fp8calib.commands.options import ProgressCallback
from fp8calib.errors import Fp8CalibWarning


class Reporter(Progress, Protocol):
    """Gets what a command says while it runs; the progress of a run may be any reporter."""

    def say(self, text: str) -> None:
        """Tell what the command does."""

    def warn(self, text: str) -> None:
        """Tell of something that the user should know about the result."""


class CallbackProgress:
    """Reports the progress of a run to a callback; None reports nothing."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._name = ""
        self._total: int | None = None
        self._done = 0

    def stage(
        self,
        name: str,
        total: int | None,
        *,
        unit: str = "steps",  # noqa: ARG002
        layers: int = 0,  # noqa: ARG002
        batches: int = 0,  # noqa: ARG002
    ) -> None:
        """Begin a stage of `total` units."""
        self._name, self._total, self._done = name, total, 0
        self.advance(0)

    def advance(self, steps: int) -> None:
        """Advance by `steps`."""
        self._done += steps
        if self._callback is not None:
            self._callback(self._name, self._done, self._total)


class PythonReporter(CallbackProgress):
    """Makes Python warnings of what the user should know, and calls back with the progress."""

    def __init__(self, callback: ProgressCallback | None) -> None:
        super().__init__(callback)
        self._caller = sys._getframe(2)  # the user's, above the public function
        self._line = self._caller.f_lineno

    def say(self, text: str) -> None:
        """Drop it: the function's result has what is worth keeping."""

    def warn(self, text: str) -> None:
        """Issue a warning, as of the line that called the public function."""
        warnings.warn_explicit(
            text,
            Fp8CalibWarning,
            self._caller.f_code.co_filename,
            self._line,
            module=self._caller.f_globals.get("__name__"),
            registry=self._caller.f_globals.setdefault("__warningregistry__", {}),
        )
