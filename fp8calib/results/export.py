"""What `export` wrote."""

from __future__ import annotations

from pathlib import Path

from fp8calib.overview import Overview
from fp8calib.results.record import Result
from fp8calib.results.served import FormatBriefServing, FormatLimitation, FormatServing


class ExportResult(Result):
    """The files that were written, and what a user should know: what `--json` prints."""

    left_out = ("serving", "limitations", "other_engines")

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    warnings: tuple[str, ...]
    compared: str = ""
    """Which linears of a quantized model are those of the calibrated one, in words."""
    serving: tuple[FormatServing, ...] | None = None
    """Who serves the files is known with a model, and left out without."""
    limitations: tuple[FormatLimitation, ...] | None = None
    other_engines: tuple[FormatBriefServing, ...] | None = None

    def overview(self) -> Overview:
        """Summarize what was written."""
        commands = (f"{each.engine}: {each.command}" for each in self.serving or ())
        counted = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return Overview(
            title=f"{counted} in {self.out}: {', '.join(self.files)}",
            notes=[*self.warnings, *commands],
        )
