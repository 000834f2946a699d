"""What a calibration measured and wrote."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ConfigDict, Field, SkipValidation

from fp8calib.calibration.header import Skipped
from fp8calib.calibration.observed_batches import BackOff
from fp8calib.calibration.saturation import PositionSaturation, Saturation
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.errors import ExportError
from fp8calib.formats.registry import list_written
from fp8calib.overview import Overview
from fp8calib.results.hashes import RunHashes
from fp8calib.results.record import BeforeAfter, Record, Result, ShardIndex
from fp8calib.results.run_plan import MeasuredMemory, TextRows
from fp8calib.results.written import WrittenCheck

if TYPE_CHECKING:
    from fp8calib.jobs.stats import CalibrationStats
else:  # the class of the package above, which adds methods
    from fp8calib.calibration.calibration_stats import CalibrationStats


class Coverage(Record):
    """What was observed, and what was not."""

    observed: int
    skipped: tuple[Skipped, ...]


class ExpertLayer(Record):
    """The tokens that reached the experts of a layer."""

    module: str
    min: int
    median: int | float
    max: int
    never_reached: tuple[int, ...]


class Experts(Record):
    """The tokens that reached experts, and the scale of those that none reached."""

    fallback: str
    layers: tuple[ExpertLayer, ...]


class NotQuantized(Record):
    """Why the recipe's FP8 checkpoint was not written."""

    scheme: str
    why: str


class CalibrateResult(Result):
    """The statistics of a calibration, and what `--json` prints of it, which is report.json too."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    left_out = ("shard", "quantize", "rules")

    stats: CalibrationStats = Field(exclude=True)
    was_finished: bool = Field(default=False, exclude=True)
    """Whether an earlier run had written all of it."""
    failure: str = Field(default="", exclude=True)
    """Why not all was written; empty if it was. It is among the warnings."""

    model: str
    command: str
    recipe: str
    data: tuple[str, ...]
    seq_len: int | None
    rows: SkipValidation[TextRows] | None
    measured_quantized: str
    architecture: str
    out: Path | None
    """None if nothing was written."""
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    tokens: int
    sequences: int
    shard: ShardIndex | None = None
    duration_s: float
    tokens_per_s: float
    dtype: str
    dtype_why: str
    device: str
    engine: str
    """What ran the text, its version and parallelism; empty for transformers."""
    memory: SkipValidation[MeasuredMemory]
    batch_size: int
    batch_back_off: tuple[BackOff, ...]
    resumed_sequences: int
    ranks: int
    rule: str
    rules: dict[str, str] | None = None
    """Those of the recipe for single K and V, by pattern."""
    coverage: Coverage
    saturation: Saturation | None
    positions: PositionSaturation | None
    expert_tokens: dict[str, list[int]]
    experts: Experts | None
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""
    warnings: tuple[str, ...]
    versions: dict[str, str]
    date: str
    """UTC, in the form of ISO 8601."""
    model_hash: str
    """Of the config and a sample of every tensor, however the weights are sharded."""
    data_hash: str
    """Of the token ids, pixels and samples of all sequences."""
    hashes: RunHashes | None = None
    """None if nothing was written."""
    quantize: QuantizeResult | NotQuantized | None = None
    """The checkpoint of a recipe that has one."""

    @property
    def passed(self) -> bool:
        """Whether all was written."""
        return not self.failure

    @property
    def exit_code(self) -> int:
        """That of an output that cannot be written, if one could not."""
        return 0 if self.passed else ExportError.exit_code

    @property
    def overlay(self) -> Path | None:
        """The first checkpoint with KV scales that was written; None if there is none."""
        overlays = (each.path() for each in list_written() if each.needs_model)
        written = (path for path in overlays if any(f.startswith(f"{path}/") for f in self.files))
        path = next(written, None)
        return None if self.out is None or path is None else self.out / path

    def overview(self) -> Overview:
        """Summarize the statistics, and name the files."""
        shown = self.stats.overview()
        written = [f"written to {self.out}: {', '.join(self.files)}"] if self.files else []
        return Overview(
            title=shown.title,
            columns=shown.columns,
            rows=shown.rows,
            notes=[*shown.notes, *written],
        )
