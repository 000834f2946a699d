"""What `check` says of a checkpoint that a command wrote."""

from __future__ import annotations

from fp8calib.results.record import Record


class WrittenCheck(Record):
    """What an engine will do with a written checkpoint."""

    path: str
    """Of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Its name and release."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty where it is not ok."""

    def __str__(self) -> str:
        return f"{self.engine}: {self.command or self.summary}"
