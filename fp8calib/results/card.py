"""What `card` wrote."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from fp8calib.overview import Overview
from fp8calib.results.push import PushResult
from fp8calib.results.record import Result


class CardResult(Result):
    """A model card that was written."""

    path: Path
    upload: str
    """The command that uploads the folder."""
    warnings: tuple[str, ...] = ()
    """That no licence is known, and where no engine uses what the folder holds."""
    entries: tuple[Path, ...] = ()
    """The entries of the engines' collections that were written."""
    push: PushResult | None = None
    """What is or would be uploaded; None without --push."""
    text: str = Field(exclude=True)
    """The card itself, which `--json` leaves out."""

    def overview(self) -> Overview:
        """Name the file and the command that uploads it."""
        warnings = (f"warning: {text}" for text in self.warnings)
        return Overview(f"CardResult: {self.path}", notes=[f"upload: {self.upload}", *warnings])
