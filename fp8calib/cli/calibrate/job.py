"""The settings of `fp8calib calibrate`, and the job that follows from them before the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8calib.calibration import PreparedModel
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.plan import DataPlan
from fp8calib.data.shares import Share
from fp8calib.dialects.write import list_outputs
from fp8calib.model.load import ModelSource
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_stats import STATS_NAME

REPORT_NAME = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateSettings:
    """The command line, resolved."""

    model: str
    recipe: Recipe
    out: Path | None
    device: str
    dtype: str
    device_map: str | None
    memory: float | None
    """In GiB; None: what is available on the machine."""
    resume: bool
    shard: Share | None
    revision: str | None
    trust_remote_code: bool
    force: bool
    dry_run: bool
    as_json: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateJob:
    """Everything decided before a weight is loaded."""

    settings: CalibrateSettings
    source: ModelSource
    checkpoint: Checkpoint
    prepared: PreparedModel
    """The model without weights."""
    plan: DataPlan | None
    out: Path
    device: str
    dtype: str
    dtype_why: str

    @property
    def recipe(self) -> Recipe:
        """The recipe with the command line's changes."""
        return self.settings.recipe

    @property
    def owned(self) -> frozenset[str]:
        """Names of the files and folders that the command writes in the output folder."""
        formats = list_outputs(self.recipe.formats, self.recipe.tp)
        checkpoint = {self.recipe.quantize} if self.recipe.quantize else frozenset[str]()
        return frozenset({STATS_NAME, REPORT_NAME}) | formats | checkpoint
