"""What `extract-kv-scales` wrote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8calib.overview import Overview
from fp8calib.results.record import BeforeAfter, Record, Result
from fp8calib.results.written import WrittenCheck

Numbers = float | tuple[float, ...]
"""One number, or one for each rank or head."""


class ExtractedLayer(Record):
    """The scales of a layer as written."""

    layer: int
    module: str
    k: Numbers
    v: Numbers
    q: Numbers | None = None


class ExtractResult(Result):
    """The scales that were written, and who serves them: what `--json` prints."""

    save_path: Path
    files: tuple[str, ...]
    """Relative to `save_path`, sorted."""
    dialect: str
    """Of the source."""
    source_dtype: str
    format: str
    fp8_dtype: str
    tp: int | tuple[int, ...]
    taken_from: tuple[str, ...]
    """The source's files, each as folder and file name."""
    layers: tuple[ExtractedLayer, ...]
    notes: tuple[str, ...]
    compared: str = ""
    """Which linears of a quantized model are those of the calibrated one, in words."""
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""

    def to_json(self) -> dict[str, Any]:
        """Make the object that `--json` prints; a layer without q has no key for it."""
        return {**super().to_json(), **self.model_dump(mode="json", exclude_none=True)}

    def overview(self) -> Overview:
        """Summarize what was written."""
        return Overview(
            title=f"{self.format} in {self.save_path}: {len(self.layers)} layers of "
            f"{self.dialect} scales",
            notes=[
                *self.notes,
                *map(str, self.checked),
            ],
        )
