"""The job of a calibration that writes its progress to disk, so that it can be resumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fp8calib.calibration.calibrate import TextEngine
from fp8calib.calibration.calibration_stats import REPORT_NAME, STATS_NAME
from fp8calib.calibration.observed_batches import choose_batch_size
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.calibration.recorder import LayerWork
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.result import ShardIndex
from fp8calib.data.sequences import Batch, DataPlan
from fp8calib.data.shares import Share, select_batches
from fp8calib.errors import ExportError
from fp8calib.formats.write import list_outputs
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.reporter import Reporter
from fp8calib.numerics.formats import E4M3FN
from fp8calib.quantization.plan import PlanSettings, select_linears
from fp8calib.quantization.select import Selection
from fp8calib.quantization.sources.already_quantized import check_unquantized


class LayerJob(Protocol):
    """Work on the inputs of every layer, such as rounding its weights; the model is streamed."""

    why_streamed: str

    def estimate_bytes(self, job: ResumableJob) -> int:
        """Estimate the memory that it needs beside the calibration's own."""

    def open(self, job: ResumableJob, folder: Path) -> LayerWork:
        """Make what works on each layer, and writes into the working folder of the run."""

    def check_same(self, folder: Path) -> None:
        """Refuse what an interrupted run with other options has left in a working folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableJob(RunModel):
    """A model and what is to be observed of it, decided before a weight is loaded."""

    recipe: Recipe
    """With the caller's changes."""
    plan: DataPlan | None
    """None for a recipe that runs no data."""
    specs: Sequence[str] = ()
    """The values of `--data` that are read."""
    shard: Share | None = None
    out: Path | None
    """None writes nothing."""
    group: ProcessGroup = LONE
    """The processes that divide the text."""
    resume: bool
    force: bool
    engine: TextEngine | None = None
    """What runs the text; None runs it with transformers."""
    reporter: Reporter
    quantization: PlanSettings | None = None
    """How the FP8 checkpoint is written; None without one."""
    layer_job: LayerJob | None = None
    """What also works on each layer while its inputs are there; None if nothing does."""

    @property
    def batch_size(self) -> int:
        """The sequences of a batch; an engine runs them one by one."""
        if self.recipe.data.batch_size is not None:
            return self.recipe.data.batch_size
        if self.plan is None or self.engine is not None:
            return 1
        return choose_batch_size(self.device, self.plan.seq_len)

    def list_batches(self) -> list[Batch]:
        """List the batches of its shard, those that an interrupted run has done among them.

        Raises:
            UsageError: there are fewer batches than shards.
        """
        if self.plan is None:
            return []
        return select_batches(self.plan, self.batch_size, self.shard)

    def count(self) -> dict[str, Any]:
        """Count its sequences and tokens, and name its shard."""
        batches, shard = self.list_batches(), self.shard
        return {
            "sequences": sum(len(batch.lengths) for batch in batches),
            "tokens": sum(batch.num_tokens for batch in batches),
            **(
                {} if shard is None else {"shard": ShardIndex(index=shard.index, count=shard.count)}
            ),
        }

    @property
    def folder(self) -> Path:
        """The output folder of a job that has one."""
        assert self.out is not None  # noqa: S101 -- the caller knows
        return self.out

    @property
    def owned(self) -> frozenset[str]:
        """Names of the files and folders that a calibration writes in the output folder."""
        if self.out is None:
            return frozenset()
        formats = list_outputs(self.recipe.formats, self.recipe.tp)
        folder = self.recipe.quantize and self.recipe.quantize.folder
        checkpoint = {folder} if folder else frozenset[str]()
        return frozenset({STATS_NAME, REPORT_NAME}) | formats | checkpoint


def select_matrices(job: ResumableJob, settings: PlanSettings) -> Selection:
    """Choose the linears to quantize.

    Raises:
        ModelError: the weights cannot be quantized.
        ExportError: the recipe asks for another FP8 format than checkpoints hold.
        UsageError: a pattern names no linear, or divides what engines load as one weight.
    """
    if job.recipe.scales.fp8_dtype != E4M3FN.name:
        raise ExportError(f"FP8 checkpoints hold {E4M3FN.name}, not {job.recipe.scales.fp8_dtype}")
    check_unquantized(job.checkpoint.stored)
    return select_linears(job.checkpoint, settings)
