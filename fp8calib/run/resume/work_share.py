"""What of a calibration is done here, what elsewhere, and what was done before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fp8calib.data.plan import Batch, DataPlan
from fp8calib.data.shares import Share, leave_out, share_out
from fp8calib.geometry.model_geometry import Linear
from fp8calib.geometry.sites import Site
from fp8calib.run.distributed.group import ProcessGroup
from fp8calib.run.forward.whole import BackOff
from fp8calib.run.resume.journal import NOTHING, Done, Journal
from fp8calib.stats.calibration_stats import SiteStats
from fp8calib.stats.merge import merge_sites


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShare:
    """What of a run is done here; all of it where nothing is said."""

    shard: Share | None = None
    """The part of the data, and of the weights."""
    journal: Journal | None = None
    """Where what was seen is kept, and what earlier runs have left."""
    crew: ProcessGroup | None = None
    """Other processes that run the rest."""
    back_offs: list[BackOff] = field(default_factory=list)
    """Filled by the run: where batches had to become smaller."""

    @property
    def done(self) -> Done:
        """What earlier runs have done."""
        return NOTHING if self.journal is None else self.journal.done

    @property
    def is_first(self) -> bool:
        """Whether what all processes have seen comes together here."""
        return self.crew is None or self.crew.place.is_first

    def batches(self, plan: DataPlan, batch_size: int) -> list[Batch]:
        """Give the batches that are left to run."""
        left = leave_out(share_out(plan, batch_size, self.shard), self.done.sequences)
        return left if self.crew is None else list(self.crew.take(left))

    def weights(self, linears: Sequence[Linear]) -> Sequence[Linear]:
        """Give the linears whose weights are left to read: each is read in one place."""
        mine = linears if self.shard is None else self.shard.take(linears)
        left = [each for each in mine if each.module not in self.done.weights]
        return left if self.crew is None else self.crew.take(left)

    def join(self, sites: Mapping[Site, SiteStats]) -> dict[Site, SiteStats]:
        """Join what was seen here with what all others, and earlier runs, have seen."""
        found = sites if self.crew is None else self.crew.reduce(sites)
        return merge_sites([found, {} if self.journal is None else self.journal.sites])

    def keep_weights(self, sites: Mapping[Site, SiteStats], *, duration_s: float) -> None:
        """Keep the statistics of weights for the case that the run is ended."""
        if self.journal is not None:
            self.journal.keep_weights(sites, duration_s=duration_s)

    @property
    def reads_other_weights(self) -> bool:
        """Whether the weights of no linear are looked at here."""
        return self.is_first and (self.shard is None or self.shard.index == 1)


WHOLE = WorkShare()
