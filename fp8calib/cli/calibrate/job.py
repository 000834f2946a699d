"""The job of `fp8calib calibrate`: everything decided before the run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fp8calib.calibration import PreparedModel
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.calibrate.settings import CalibrateSettings
from fp8calib.data.plan import DataPlan
from fp8calib.data.shares import Share
from fp8calib.dialects.write import list_outputs
from fp8calib.model.load import ModelSource
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_stats import STATS_NAME

REPORT_NAME = "report.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateJob:
    """Everything decided before a weight is loaded."""

    settings: CalibrateSettings
    recipe: Recipe
    """With the command line's changes."""
    shard: Share | None
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
    def owned(self) -> frozenset[str]:
        """Names of the files and folders that the command writes in the output folder."""
        formats = list_outputs(self.recipe.formats, self.recipe.tp)
        checkpoint = {self.recipe.quantize} if self.recipe.quantize else frozenset[str]()
        return frozenset({STATS_NAME, REPORT_NAME}) | formats | checkpoint
