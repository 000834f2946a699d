"""Collect the running statistics of every site, batch by batch.

They stay on the device of the observed tensors. Only `check_finite` and `stats` wait for a device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fp8calib.geometry.sites import Site
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.reductions import Reductions, join_segments, observe_input
from fp8calib.stats.histogram import count_bins_of_each
from fp8calib.stats.statistic import NUM_QUARTERS, STATISTICS, SiteStats

_REMEMBERED_INPUTS = 4
_MOST_SAMPLED = 2**23
"""How many values of histograms wait to be counted together on a GPU."""


_Update = tuple[bool, torch.Tensor, torch.Tensor]
"""Whether it is a count, the running tensor, and the tensor that is added or joined to it."""


@dataclass(slots=True)
class SiteAccumulator:
    """The running statistics of one site, on the device of its tensors.

    The amax of the current quarter of the data is kept apart, for `progress`.
    """

    count: int = 0
    quarter: torch.Tensor | None = None
    """The amax of the open quarter, zeros while none is open."""
    is_open: bool = False
    """Whether `quarter` is not yet part of `tensors`."""
    progress: list[torch.Tensor | None] = field(default_factory=lambda: [None] * NUM_QUARTERS)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of their statistic; `amax` is that of the closed quarters."""

    def observe(self, seen: Reductions) -> Iterator[_Update]:
        """Count the tokens of a batch, and give the updates that add it to the open quarter."""
        self.count += seen.num_tokens
        self.is_open = True
        for name, new in seen.tensors.items():
            if name == "amax":
                if self.quarter is None:
                    self.quarter = STATISTICS[name].start(new)
                yield False, self.quarter, new
                continue
            running = self._running(name, new)
            reached = running if STATISTICS[name].length is None else running[: len(new)]
            yield STATISTICS[name].is_count, reached, new

    def _running(self, name: str, new: torch.Tensor) -> torch.Tensor:
        if name not in self.tensors:
            self.tensors[name] = STATISTICS[name].start(new)
        return self.tensors[name]

    def close_quarter(self, quarter: int) -> None:
        """Add the amax of the open quarter to the running one; the quarter may be opened again."""
        if self.quarter is None or not self.is_open:
            return
        largest = self.quarter.max()
        before = self.progress[quarter]
        self.progress[quarter] = largest if before is None else torch.maximum(before, largest)
        torch.maximum(amax := self._running("amax", self.quarter), self.quarter, out=amax)
        self.quarter.zero_()
        self.is_open = False

    def freeze(self) -> SiteStats:
        """Return the statistics on the CPU; no quarter may be open."""
        progress = [0.0 if amax is None else float(amax) for amax in self.progress]
        tensors = {name: tensor.cpu() for name, tensor in self.tensors.items()}
        return SiteStats(count=self.count, tensors=tensors, progress=torch.tensor(progress))


class Recorder:
    """Collects statistics batch by batch: `begin_batch`, the observations, `end_batch`.

    A batch counts when it ends; an interrupted batch changes nothing.
    """

    def __init__(self) -> None:
        self._running: defaultdict[Site, SiteAccumulator] = defaultdict(SiteAccumulator)
        self._pending: list[tuple[Site, Reductions]] = []
        self._sampled: dict[int, Reductions] = {}
        """Those whose histogram is not counted yet, by identity."""
        self._num_sampled = 0
        self._sequences: list[tuple[int, int]] = []
        self.is_settled = True
        """Whether every batch counts fully or not at all; `end_batch` may be interrupted."""
        self._quarter = 0
        self._batch: BatchView | None = None
        self._inputs: list[tuple[torch.Tensor, int, Reductions]] = []
        """The last inputs with their versions: the next linear may read the same tensor."""

    @property
    def batch(self) -> BatchView:
        """The batch being observed."""
        if self._batch is None:
            msg = "no batch is open"
            raise RuntimeError(msg)
        return self._batch

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch: observations belong to it until `end_batch`."""
        if batch.quarter != self._quarter:
            self._close_quarter()
            self._quarter = batch.quarter
        self._drop_batch()
        self._batch = batch

    def end_batch(self) -> None:
        """Close the batch and add its observations to the running statistics."""
        self._count_sampled()
        self._join_segments()
        self.is_settled = False
        _apply(
            update for site, seen in self._pending for update in self._running[site].observe(seen)
        )
        first = self.batch.first
        self._sequences.append((first, first + self.batch.shape[0]))
        self.is_settled = True
        self._drop_batch()

    def _drop_batch(self) -> None:
        self._batch = None
        self._pending.clear()
        self._drop_sampled()
        self._inputs.clear()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences of all batches that count, as half-open ranges in order."""
        return tuple(self._sequences)

    def record(self, site: Site, seen: Reductions) -> None:
        """Add what was observed at a site to the open batch."""
        self._pending.append((site, seen))
        if seen.sampled is not None and id(seen) not in self._sampled:
            self._sampled[id(seen)] = seen
            self._num_sampled += seen.sampled.numel()
            if seen.sampled.device.type == "cpu" or self._num_sampled >= _MOST_SAMPLED:
                self._count_sampled()

    def _count_sampled(self) -> None:
        groups = defaultdict[tuple[torch.device, torch.dtype], list[Reductions]](list)
        for seen in self._sampled.values():
            if seen.sampled is not None:
                groups[seen.sampled.device, seen.sampled.dtype].append(seen)
        for group in groups.values():
            sampled = [seen.sampled for seen in group if seen.sampled is not None]
            for seen, histogram in zip(group, count_bins_of_each(sampled), strict=True):
                seen.tensors["histogram"] = histogram
                seen.sampled = None
        self._drop_sampled()

    def _join_segments(self) -> None:
        groups = defaultdict[torch.device, dict[int, Reductions]](dict)
        for _, seen in self._pending:
            if seen.segments:
                groups[seen.segments[0].device][id(seen)] = seen
        for group in groups.values():
            join_segments(list(group.values()))

    def _drop_sampled(self) -> None:
        self._sampled.clear()
        self._num_sampled = 0

    def record_input(self, site: Site, x: torch.Tensor) -> None:
        """Observe the input of a linear, once for all linears that read the same tensor."""
        for tensor, version, seen in self._inputs:
            if tensor is x and version == x._version:
                self.record(site, seen)
                return
        seen = observe_input(self.batch, site, x)
        self.record(site, seen)
        self._inputs.append((x, x._version, seen))
        del self._inputs[:-_REMEMBERED_INPUTS]

    def check_finite(self) -> Site | None:
        """Find the first site, in execution order, with NaN or inf; waits for devices."""
        found = {
            site: each.quarter
            for site, each in self._running.items()
            if each.is_open and each.quarter is not None
        }
        by_device = defaultdict[torch.device, list[torch.Tensor]](list)
        for amax in found.values():
            by_device[amax.device].append(amax)
        if all(map(_all_finite, by_device.values())):
            return None
        return next(site for site, amax in found.items() if not _all_finite([amax]))

    def stats(self) -> dict[Site, SiteStats]:
        """Close the open quarter and return all statistics, on the CPU."""
        self._close_quarter()
        return {site: running.freeze() for site, running in self._running.items()}

    def forget(self) -> None:
        """Drop all statistics."""
        self._drop_batch()
        self._running.clear()
        self._sequences.clear()

    def _close_quarter(self) -> None:
        for running in self._running.values():
            running.close_quarter(self._quarter)


def _apply(updates: Iterable[_Update]) -> None:
    """Add or join tensors to running ones, many in one kernel; no two of a kernel to the same."""
    groups = defaultdict[tuple[int, bool, torch.device], tuple[list[torch.Tensor], ...]](
        lambda: ([], [])
    )
    earlier = Counter[int]()
    for is_count, running, new in updates:
        place = running.data_ptr()
        runnings, news = groups[earlier[place], is_count, running.device]
        runnings.append(running)
        news.append(new.to(running.device))
        earlier[place] += 1
    for (_, is_count, _), (runnings, news) in groups.items():
        (torch._foreach_add_ if is_count else torch._foreach_maximum_)(runnings, news)


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return bool(torch.cat([tensor.flatten() for tensor in tensors]).isfinite().all())
