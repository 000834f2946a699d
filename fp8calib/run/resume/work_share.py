"""The share of a run that this process does, without what earlier runs have done."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed import ReduceOp

from fp8calib.data.sequences import Batch, DataPlan
from fp8calib.data.shares import Share, drop_finished, select_batches
from fp8calib.geometry.model_geometry import Linear
from fp8calib.geometry.sites import Site
from fp8calib.run.forward.back_off import BackOff
from fp8calib.run.processes import LONE, ProcessGroup
from fp8calib.run.resume.journal import NOTHING, Done, Journal
from fp8calib.stats.merge import merge_sites
from fp8calib.stats.statistic import STATISTICS, SiteStats, group_tensors, name_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkShare:
    """The share of a run that this process does: by default all of it."""

    shard: Share | None = None
    """The shard of the data and of the weights that `--shard` chose."""
    journal: Journal | None = None
    """Checkpoints of this run, and what earlier runs have done."""
    group: ProcessGroup = LONE
    """The processes that divide the shard among them."""
    back_offs: list[BackOff] = field(default_factory=list)
    """Filled by the run: where batches became smaller because memory ran out."""

    @property
    def done(self) -> Done:
        """What earlier runs have done."""
        return NOTHING if self.journal is None else self.journal.done

    @property
    def is_first(self) -> bool:
        """Whether this process joins the statistics of all."""
        return self.group.is_first

    def batches(self, plan: DataPlan, batch_size: int) -> list[Batch]:
        """Give the batches this process has still to run."""
        remaining = drop_finished(select_batches(plan, batch_size, self.shard), self.done.sequences)
        return list(self.group.share_of(remaining))

    def weights(self, linears: Sequence[Linear]) -> Sequence[Linear]:
        """Give the linears whose weights this process has still to read: one process reads each."""
        mine = linears if self.shard is None else self.shard.take(linears)
        unread = [each for each in mine if each.module not in self.done.weights]
        return self.group.share_of(unread)

    def join(self, sites: Mapping[Site, SiteStats]) -> dict[Site, SiteStats]:
        """Join the statistics of all processes and of earlier runs, in the first process."""
        earlier = {} if self.journal is None else self.journal.sites
        if self.group.size > 1:
            maxima: dict[str, torch.Tensor] = {}
            counts = {f"{site}/count": torch.tensor(sites[site].count) for site in sites}
            for key, tensor in name_tensors(sites):
                is_count = STATISTICS[key.rpartition("/")[2]].is_count
                (counts if is_count else maxima)[key] = tensor
            joined = self.group.all_reduce(maxima, ReduceOp.MAX)
            joined |= self.group.all_reduce(counts, ReduceOp.SUM, torch.int64)
            sites = _group_sites(joined) if self.is_first else {}
        return merge_sites([sites, earlier])

    @property
    def reads_other_weights(self) -> bool:
        """Whether this process checks the tensors that belong to no linear."""
        return self.is_first and (self.shard is None or self.shard.index == 1)


def _group_sites(joined: Mapping[str, torch.Tensor]) -> dict[Site, SiteStats]:
    by_site = group_tensors({key: joined[key].clone() for key in sorted(joined)})  # some are views
    return {
        Site.parse(site): SiteStats(count=int(tensors.pop("count")), tensors=tensors)
        for site, tensors in by_site.items()
    }


WHOLE = WorkShare()
