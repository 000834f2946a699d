"""The protocol of progress, without torch: commands that do not need torch report it too."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Shows the progress of a run."""

    def stage(self, name: str, total: int | None, *, unit: str = "steps", layers: int = 0) -> None:
        """Begin a stage of `total` units, which may go through layers one after the other."""

    def advance(self, steps: int) -> None:
        """Advance by `steps`."""
