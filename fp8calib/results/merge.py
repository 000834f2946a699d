"""What `merge` wrote."""

from __future__ import annotations

from pathlib import Path

from fp8calib.overview import Overview, WithOverview
from fp8calib.results.record import Record


class MergeResult(WithOverview, Record):
    """The statistics of all shards: what `--json` prints."""

    out: Path
    parts: tuple[Path, ...]
    """The files that were joined."""
    tokens: int
    sequences: int
    sites: int
    """Tensors with statistics."""

    def overview(self) -> Overview:
        """Summarize the statistics."""
        return Overview(
            title=f"{len(self.parts)} shards, {self.tokens:,} tokens in {self.sequences} "
            f"sequences, written to {self.out}"
        )
