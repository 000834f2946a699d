"""The recorder: running statistics of every site, kept beside the model, never on it.

Everything stays on the device of the tensors it came from; the host reads nothing back until
`check_finite` or `stats` is called.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fp8calib.geometry.sites import Site
from fp8calib.observe.accumulators import Observation, SiteAccumulator
from fp8calib.observe.batch_view import BatchView
from fp8calib.observe.observed import observe_input
from fp8calib.stats.statistic import STATISTICS, ObservedTensor, SiteStats

_REMEMBERED_INPUTS = 4


class Recorder:
    """Collects statistics batch by batch; `begin_batch` first, then the observations.

    A batch counts when it ends; one that is interrupted leaves no trace.
    """

    def __init__(self) -> None:
        self._running: dict[Site, SiteAccumulator] = {}
        self._pending: list[Observation] = []
        self._sequences: list[tuple[int, int]] = []
        self._is_settled = True
        self._quarter = 0
        self._batch: BatchView | None = None
        self._inputs: list[tuple[torch.Tensor, int, Observation]] = []
        """The last inputs, each with its version: the next linear may read the same tensor."""

    @property
    def batch(self) -> BatchView:
        """The batch being observed."""
        if self._batch is None:
            msg = "an observation outside of a batch"
            raise RuntimeError(msg)
        return self._batch

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch; what is observed from now on belongs to it."""
        if batch.quarter != self._quarter:
            self._close_quarter()
            self._quarter = batch.quarter
        self._let_go()
        self._batch = batch

    def end_batch(self) -> None:
        """Close the batch: what was observed counts from now on."""
        self._is_settled = False
        for seen in self._pending:
            self._site(seen.site).observe(seen)
        first = self.batch.first
        self._sequences.append((first, first + self.batch.shape[0]))
        self._is_settled = True
        self._let_go()

    def _let_go(self) -> None:
        self._batch = None
        self._pending.clear()
        self._inputs.clear()

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The sequences that count: first and the one after the last of every batch, in order."""
        return tuple(self._sequences)

    @property
    def is_settled(self) -> bool:
        """Whether every batch counts whole or not at all: an interruption may come in between."""
        return self._is_settled

    def record(self, site: Site, seen: ObservedTensor) -> Observation:
        """Compute the statistics of a tensor of the batch."""
        tensors = {
            statistic.name: found
            for statistic in STATISTICS.values()
            if statistic.observe is not None and (found := statistic.observe(seen)) is not None
        }
        observation = Observation(site=site, num_tokens=seen.num_tokens, tensors=tensors)
        self._pending.append(observation)
        return observation

    def record_input(self, site: Site, x: torch.Tensor) -> None:
        """Compute the statistics of the input of a linear, once for all that read one tensor."""
        for tensor, version, observation in self._inputs:
            if tensor is x and version == x._version:
                self._pending.append(replace(observation, site=site))
                return
        observation = self.record(site, observe_input(self.batch, site, x))
        self._inputs.append((x, x._version, observation))
        del self._inputs[:-_REMEMBERED_INPUTS]

    def check_finite(self) -> Site | None:
        """Name the first site, in execution order, that saw NaN or inf; waits for devices."""
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
        """Close the last quarter and give what was seen, on the CPU."""
        self._close_quarter()
        return {site: running.freeze() for site, running in self._running.items()}

    def forget(self) -> None:
        """Drop everything seen so far."""
        self._let_go()
        self._running.clear()
        self._sequences.clear()

    def _site(self, site: Site) -> SiteAccumulator:
        running = self._running.get(site)
        if running is None:
            running = self._running[site] = SiteAccumulator()
        return running

    def _close_quarter(self) -> None:
        for running in self._running.values():
            running.close_quarter(self._quarter)


def _all_finite(tensors: list[torch.Tensor]) -> bool:
    return bool(torch.cat([tensor.flatten() for tensor in tensors]).isfinite().all())
