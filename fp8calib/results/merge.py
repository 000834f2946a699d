"""What `merge` wrote."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from fp8calib.overview import Overview
from fp8calib.results.record import Result


class MergeResult(Result):
    """The statistics of all shards: what `--json` prints."""

    model: str = Field(exclude=True)
    """The model in the reports beside the shards; MODEL where they have none."""
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
