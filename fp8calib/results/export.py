"""What `export` wrote."""

from __future__ import annotations

from pathlib import Path

from fp8calib.overview import Overview
from fp8calib.results.record import Result
from fp8calib.results.written import WrittenCheck


class ExportResult(Result):
    """The files that were written, and what a user should know: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    warnings: tuple[str, ...]
    shards: tuple[str, ...] = ()
    """The statistics that were joined; empty for those of one run."""
    compared: str = ""
    """Which linears of a quantized model are those of the calibrated one, in words."""
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""

    def overview(self) -> Overview:
        """Summarize what was written."""
        commands = map(str, self.checked)
        counted = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return Overview(
            title=f"{counted} in {self.out}: {', '.join(self.files)}",
            notes=[*self.warnings, *commands],
        )
