"""Progress by callback."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from fp8calib.errors import Fp8CalibWarning
from fp8calib.jobs.spelling import spell_for_caller
from fp8calib.requests.shared import ProgressCallback


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


def warn_each(texts: Iterable[str]) -> None:
    """Issue Python warnings, as the caller of the public function sees them."""
    # above it: this function, the public one, and the check of its arguments
    for text in texts:
        warnings.warn(spell_for_caller(text), Fp8CalibWarning, stacklevel=4)
