"""What runs the text of a calibration in place of transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.geometry.sites import Site
from fp8calib.machine.progress import Progress
from fp8calib.model.prepared import PreparedModel
from fp8calib.recipe import Recipe
from fp8calib.run.resume.work_share import WorkShare
from fp8calib.stats.statistic import SiteStats


class TextEngine(Protocol):
    """An engine that loads the model itself, runs batches and observes them."""

    def describe(self) -> str:
        """Describe its version and how it runs, as the header of the statistics has it."""

    def observe(
        self,
        prepared: PreparedModel,
        checkpoint: Checkpoint,
        todo: Sequence[Batch],
        recipe: Recipe,
        *,
        num_sequences: int,
        progress: Progress,
        share: WorkShare,
    ) -> tuple[dict[Site, SiteStats], Mapping[Site, str]]:
        """Run batches; give the statistics, and the sites that it does not show, with the reason.

        The whole run has `num_sequences`; `prepared` has no weights.
        """
