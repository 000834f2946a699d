"""Record what the hooks show: the running statistics of every site, batch by batch.

They stay on the device of the observed tensors. Only `find_nonfinite` and `stats` wait for a
device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch

from fp8calib.calibration.hooks import ExpertsCall
from fp8calib.calibration.reductions import (
    BatchView,
    Reductions,
    observe_expert_down,
    observe_expert_input,
    observe_heads,
    observe_input,
)
from fp8calib.calibration.statistic import COUNTS, LENGTHS, SiteStats
from fp8calib.model.shapes import Attention, Layer, Linear, Role, Site

_REMEMBERED_INPUTS = 4

_Update = tuple[bool, torch.Tensor, torch.Tensor]
"""Whether it is a count, the running tensor, and the tensor that is added or joined to it."""


class LayerWork(Protocol):
    """Work on each layer with the inputs of its linears, beside the statistics.

    It must not change the inputs.
    """

    def on_input(self, batch: BatchView, linear: Linear, x: torch.Tensor) -> None:
        """Receive the input of a linear: [..., C]."""

    def on_expert_input(self, batch: BatchView, call: ExpertsCall, hidden: torch.Tensor) -> None:
        """Receive the input of gate and up: [N, C]."""

    def on_expert_down(self, batch: BatchView, call: ExpertsCall, rows: torch.Tensor) -> None:
        """Receive the input of down, its rows sorted by expert: [N * K, C]."""

    def finish_layer(self, layer: Layer) -> None:
        """Finish a layer that all batches have run through."""

    def forget(self) -> None:
        """Drop all inputs that were received: the run starts again."""


class Recorder:
    """Receives the hooked tensors and changes none (`TensorHooks`).

    Batches that end are counted fully, others not at all.

    Attributes:
        batch: the batch being observed.
        sequences: those of all batches that count, as half-open ranges in order.
    """

    batch: BatchView
    sequences: tuple[tuple[int, int], ...]

    def __init__(self, num_sequences: int, work: LayerWork | None = None) -> None:
        """Record a run of so many sequences, which may show only some of them.

        `work` also gets the inputs of linears.
        """
        self.num_sequences = num_sequences
        self._work = work
        self._inputs: list[tuple[torch.Tensor, int, Reductions]] = []
        """The last inputs with their versions: the next linear may read the same tensor."""
        self._pending: list[tuple[Site, Reductions]] = []
        self.forget()

    def forget(self) -> None:
        """Drop all statistics."""
        self._drop_batch()
        self.sequences = ()
        self._unchecked: list[tuple[int, int]] = []
        self._counts = Counter[Site]()
        self._tensors = defaultdict[Site, dict[str, torch.Tensor]](dict)
        self._unchecked_sites: dict[Site, None] = {}  # in execution order

    # --- hooks ------------------------------------------------------------------------------------

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record K and V per head."""
        for role, x in ((Role.K, key), (Role.V, value)):
            seen = observe_heads(self.batch, role, x, attention.num_kv_heads)
            self.record(attention.site(role), seen)
        return key, value

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Record q per head."""
        seen = observe_heads(self.batch, Role.Q, query, query.shape[1])
        self.record(attention.site(Role.Q), seen)
        return query

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Record the input of a linear per channel, reduced once for all that read the tensor."""
        site = Site(linear.module, Role.INPUT)
        for tensor, version, seen in self._inputs:
            if tensor is x and version == x._version:
                self._pending.append((site, seen))
                break
        else:
            seen = observe_input(self.batch, site, x)
            self.record(site, seen)
            self._inputs = [*self._inputs[1 - _REMEMBERED_INPUTS :], (x, x._version, seen)]
        if self._work is not None:
            self._work.on_input(self.batch, linear, x)
        return x

    def on_expert_input(self, call: ExpertsCall, hidden: torch.Tensor) -> torch.Tensor:
        """Record the input of gate and up per channel and per expert."""
        names = ("gate_proj", "up_proj") if call.module.has_gate else ("up_proj",)
        sites = [Site(f"{call.path}.{name}", Role.INPUT) for name in names]
        seen = observe_expert_input(self.batch, sites[0], hidden, call.index, call.num_experts)
        self.record(sites[0], seen)
        self._pending.extend((site, seen) for site in sites[1:])
        if self._work is not None:
            self._work.on_expert_input(self.batch, call, hidden)
        return hidden

    def on_expert_down(self, call: ExpertsCall, rows: torch.Tensor) -> torch.Tensor:
        """Record the input of down per channel and per expert."""
        seen = observe_expert_down(self.batch, call, rows)
        self.record(Site(f"{call.path}.down_proj", Role.INPUT), seen)
        if self._work is not None:
            self._work.on_expert_down(self.batch, call, rows)
        return rows

    def record(self, site: Site, seen: Reductions) -> None:
        """Add what was observed at a site to the open batch."""
        self._pending.append((site, seen))

    # --- batches ----------------------------------------------------------------------------------

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch; one that has not ended is discarded."""
        self._drop_batch()
        self.batch = batch

    def end_batch(self) -> None:
        """Close the batch and add its observations to the running statistics."""
        sequences = self.batch.first, self.batch.first + self.batch.shape[0]
        _apply(update for site, seen in self._pending for update in self._update(site, seen))
        self._unchecked_sites |= dict.fromkeys(site for site, _ in self._pending)
        self._unchecked.append(sequences)
        self.sequences += (sequences,)
        self._drop_batch()

    def _drop_batch(self) -> None:
        self._pending.clear()
        self._inputs.clear()

    def _update(self, site: Site, seen: Reductions) -> Iterator[_Update]:
        """Give the updates that add a tensor of the batch to the running statistics."""
        self._counts[site] += seen.num_tokens
        running = self._tensors[site]
        for name, new in seen.tensors.items():
            of_run = name == "sequences"
            if name not in running:
                length = self.num_sequences if of_run else LENGTHS.get(name)
                running[name] = new.new_zeros(new.shape if length is None else (length,))
            start = self.batch.first if of_run else 0
            yield name in COUNTS, running[name][start : start + len(new)], new

    # --- results ----------------------------------------------------------------------------------

    def find_nonfinite(self) -> tuple[Site, int] | None:
        """Find NaN or inf in the batches since the last call; waits for devices.

        Returns:
            The first site in execution order, and the sequence: the first of the batches where the
            site does not tell.
        """
        batches, self._unchecked = self._unchecked, []
        sites, self._unchecked_sites = self._unchecked_sites, {}
        if not batches:
            return None
        first = min(start for start, _ in batches)
        seen = slice(first, max(stop for _, stop in batches))
        found: dict[Site, torch.Tensor] = {}
        for site in sites:
            tensors = self._tensors[site]
            found[site] = tensors["sequences"][seen] if "sequences" in tensors else tensors["amax"]
        for device in {x.device for x in found.values()}:  # one wait for each
            values = torch.cat([x for x in found.values() if x.device == device])
            if not bool(values.isfinite().all()):
                break
        else:
            return None
        site = next(site for site in sites if not bool(found[site].isfinite().all()))
        place = int((~found[site].isfinite()).nonzero()[0])
        return site, first + (place if "sequences" in self._tensors[site] else 0)

    def stats(self) -> dict[Site, SiteStats]:
        """Give all statistics, on the CPU."""
        return {
            site: SiteStats(
                count=self._counts[site], **{name: x.cpu() for name, x in running.items()}
            )
            for site, running in self._tensors.items()
        }


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
