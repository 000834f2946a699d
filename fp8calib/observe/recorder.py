"""Collect the running statistics of every site, batch by batch.

They stay on the device of the observed tensors. Only `check_finite` and `stats` wait for a device.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import torch

from fp8calib.geometry.sites import Site
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.reductions import Reductions, observe_input
from fp8calib.stats.statistic import NUM_QUARTERS, STATISTICS, SiteStats

_REMEMBERED_INPUTS = 4


@dataclass(slots=True)
class SiteAccumulator:
    """The running statistics of one site, on the device of its tensors.

    The amax of the current quarter of the data is kept apart, for `progress`.
    """

    count: int = 0
    quarter: torch.Tensor | None = None
    """The amax of the open quarter; the next quarter reuses the tensor."""
    is_open: bool = False
    """Whether `quarter` is not yet part of `tensors`."""
    progress: list[torch.Tensor | None] = field(default_factory=lambda: [None] * NUM_QUARTERS)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    """By the name of their statistic; `amax` is that of the closed quarters."""

    def observe(self, seen: Reductions) -> None:
        """Add a tensor of a batch to the open quarter."""
        self.count += seen.num_tokens
        for name, new in seen.tensors.items():
            if name == "amax":
                self._observe_amax(new)
            else:
                self.tensors[name] = STATISTICS[name].update(self.tensors.get(name), new)

    def _observe_amax(self, amax: torch.Tensor) -> None:
        if self.is_open or self.quarter is None:
            self.quarter = STATISTICS["amax"].update(self.quarter, amax)
        else:
            self.quarter.copy_(amax)
        self.is_open = True

    def close_quarter(self, quarter: int) -> None:
        """Add the amax of the open quarter to the running one; the quarter may be opened again."""
        if self.quarter is None or not self.is_open:
            return
        amax, progress = STATISTICS["amax"], STATISTICS["progress"]
        self.tensors["amax"] = amax.update(self.tensors.get("amax"), self.quarter)
        self.progress[quarter] = progress.update(self.progress[quarter], self.quarter.max())
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
        self._sequences: list[tuple[int, int]] = []
        self._is_settled = True
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
        self._is_settled = False
        for site, seen in self._pending:
            self._running[site].observe(seen)
        first = self.batch.first
        self._sequences.append((first, first + self.batch.shape[0]))
        self._is_settled = True
        self._drop_batch()

    def _drop_batch(self) -> None:
        self._batch = None
        self._pending.clear()
        self._inputs.clear()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences of all batches that count, as half-open ranges in order."""
        return tuple(self._sequences)

    @property
    def is_settled(self) -> bool:
        """Whether every batch counts fully or not at all; `end_batch` may be interrupted."""
        return self._is_settled

    def record(self, site: Site, seen: Reductions) -> None:
        """Add what was observed at a site to the open batch."""
        self._pending.append((site, seen))

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
        found = {site: each.quarter for site, each in self._running.items() if each.is_open}
        by_device: dict[torch.device, list[tuple[Site, torch.Tensor]]] = {}
        for site, amax in found.items():
            if amax is not None:
                by_device.setdefault(amax.device, []).append((site, amax))
        if all(_all_finite([amax for _, amax in pairs]) for pairs in by_device.values()):
            return None
        bad = (s for s, amax in found.items() if amax is not None and not _all_finite([amax]))
        return next(bad)

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


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return bool(torch.cat([tensor.flatten() for tensor in tensors]).isfinite().all())
