"""Collect the running statistics of every site, batch by batch.

They stay on the device of the observed tensors. Only `find_nonfinite` and `stats` wait for a
device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch

from fp8calib.geometry.sites import Site
from fp8calib.numerics.histogram import count_bins_of_each
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.reductions import Reductions, join_parts, observe_input
from fp8calib.stats.statistic import STATISTICS, SiteStats

_REMEMBERED_INPUTS = 4
_MOST_SAMPLED = 2**23
"""How many values of histograms wait to be counted together on a GPU."""
_MOST_UNJOINED = 2**24
"""How many values of parts wait to be joined together."""


_Update = tuple[bool, torch.Tensor, torch.Tensor]
"""Whether it is a count, the running tensor, and the tensor that is added or joined to it."""


@dataclass(slots=True)
class _Running:
    """The running statistics of one site, on the device of its tensors."""

    count: int = 0
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of their statistic."""


class Recorder:
    """Collects statistics; batches that end are counted fully, others not at all."""

    def __init__(self, num_sequences: int) -> None:
        """Collect for a run of so many sequences, of which this recorder may see a part."""
        self._num_sequences = num_sequences
        self._running: defaultdict[Site, _Running] = defaultdict(_Running)
        self._pending: list[tuple[Site, Reductions]] = []
        self._unchecked: dict[Site, None] = {}
        """The sites since the last look for NaN, in execution order."""
        self._unchecked_batches: list[tuple[int, int]] = []
        """Their sequences, as half-open ranges."""
        self._sampled: dict[int, Reductions] = {}
        """Those whose histogram is not counted yet, by identity."""
        self._num_sampled = 0
        self._unjoined: dict[int, Reductions] = {}
        """Those whose parts are not joined yet, by identity."""
        self._num_unjoined = 0
        self._sequences: list[tuple[int, int]] = []
        self.is_settled = True
        """Whether every batch counts fully or not at all; `end_batch` may be interrupted."""
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
        if batch.first + batch.shape[0] > self._num_sequences:
            msg = f"sequence {batch.first} of a run of {self._num_sequences}"
            raise ValueError(msg)
        self._drop_batch()
        self._batch = batch

    def end_batch(self) -> None:
        """Close the batch and add its observations to the running statistics."""
        self._count_sampled()
        self._join_parts()
        sequences = self.batch.first, self.batch.first + self.batch.shape[0]
        self.is_settled = False
        _apply(update for site, seen in self._pending for update in self._update(site, seen))
        self._unchecked |= dict.fromkeys(site for site, _ in self._pending)
        self._unchecked_batches.append(sequences)
        self._sequences.append(sequences)
        self.is_settled = True
        self._drop_batch()

    def _update(self, site: Site, seen: Reductions) -> Iterator[_Update]:
        """Give the updates that add a tensor of the batch to the running statistics."""
        running = self._running[site]
        running.count += seen.num_tokens
        for name, new in seen.tensors.items():
            statistic, of_run = STATISTICS[name], name == "sequences"
            if name not in running.tensors:
                running.tensors[name] = (
                    new.new_zeros(self._num_sequences) if of_run else statistic.start(new)
                )
            start = self.batch.first if of_run else 0
            yield statistic.is_count, running.tensors[name][start : start + len(new)], new

    def _drop_batch(self) -> None:
        self._batch = None
        self._pending.clear()
        self._drop_sampled()
        self._drop_unjoined()
        self._inputs.clear()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences of all batches that count, as half-open ranges in order."""
        return tuple(self._sequences)

    @property
    def num_unchecked(self) -> int:
        """The number of batches since the last look for NaN."""
        return len(self._unchecked_batches)

    def record(self, site: Site, seen: Reductions) -> None:
        """Add what was observed at a site to the open batch."""
        self._pending.append((site, seen))
        if seen.sampled is not None and id(seen) not in self._sampled:
            self._sampled[id(seen)] = seen
            self._num_sampled += seen.sampled.numel()
            if seen.sampled.device.type == "cpu" or self._num_sampled >= _MOST_SAMPLED:
                self._count_sampled()
        if seen.parts and id(seen) not in self._unjoined:
            self._unjoined[id(seen)] = seen
            self._num_unjoined += sum(part.numel() for part in seen.parts)
            if self._num_unjoined >= _MOST_UNJOINED:
                self._join_parts()

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

    def _join_parts(self) -> None:
        groups = defaultdict[tuple[object, ...], list[Reductions]](list)
        for seen in self._unjoined.values():
            shape = len(seen.parts), *seen.parts[0].shape
            is_single = shape[:2] == (1, 1)
            groups[seen.parts[0].device, () if is_single else shape].append(seen)
        for group in groups.values():
            join_parts(group)
        self._drop_unjoined()

    def _drop_unjoined(self) -> None:
        self._unjoined.clear()
        self._num_unjoined = 0

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

    def find_nonfinite(self) -> tuple[Site, int] | None:
        """Find NaN or inf in the batches since the last call; waits for devices.

        Returns:
            The first site in execution order, and the sequence: the first of the batches where the
            site does not tell.
        """
        batches, self._unchecked_batches = self._unchecked_batches, []
        sites, self._unchecked = self._unchecked, {}
        if not batches:
            return None
        first = min(start for start, _ in batches)
        seen = slice(first, max(stop for _, stop in batches))
        by_device = defaultdict[torch.device, list[torch.Tensor]](list)
        found: dict[Site, torch.Tensor] = {}
        for site in sites:
            tensors = self._running[site].tensors
            found[site] = tensors["sequences"][seen] if "sequences" in tensors else tensors["amax"]
            by_device[found[site].device].append(found[site])
        if all(bool(torch.cat(each).isfinite().all()) for each in by_device.values()):
            return None
        site = next(site for site in sites if not bool(found[site].isfinite().all()))
        place = int((~found[site].isfinite()).nonzero()[0])
        return site, first + (place if "sequences" in self._running[site].tensors else 0)

    def stats(self) -> dict[Site, SiteStats]:
        """Give all statistics, on the CPU."""
        return {
            site: SiteStats(
                count=running.count,
                tensors={name: tensor.cpu() for name, tensor in running.tensors.items()},
            )
            for site, running in self._running.items()
        }

    def forget(self) -> None:
        """Drop all statistics."""
        self._drop_batch()
        self._unchecked.clear()
        self._unchecked_batches.clear()
        self._running.clear()
        self._sequences.clear()


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
