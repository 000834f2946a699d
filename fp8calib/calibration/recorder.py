"""Record what the hooks show: the running statistics of every site, batch by batch.

They stay on the device of the observed tensors. Only `find_nonfinite` and `stats` wait for a
device.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.calibration_stats import COUNTS, LENGTHS, SiteStats
from fp8calib.calibration.reductions import (
    observe_expert_down,
    observe_expert_input,
    observe_input,
    reduce_tokens,
)
from fp8calib.model.geometry import Attention, Layer, Linear, Role, Site

_REMEMBERED_INPUTS = 4


class Recorder:
    """Receives the hooked tensors and changes none (`TensorHooks`).

    Batches that end are counted fully, others not at all. A subclass may do more with the tensors.

    Attributes:
        batch: the batch being observed.
        sequences: those of all batches that count, as half-open ranges in order.
    """

    batch: BatchView
    sequences: tuple[tuple[int, int], ...]

    def __init__(self, num_sequences: int) -> None:
        """Record a run of so many sequences, which may show only some of them."""
        self._num_sequences = num_sequences
        self._last_inputs: list[tuple[torch.Tensor, int, SiteStats]] = []
        """The last inputs with their versions: the next linear may read the same tensor."""
        self._pending: list[tuple[Site, SiteStats]] = []
        self.sequences = ()
        self._unchecked: list[tuple[int, int]] = []
        self._unchecked_sites: dict[Site, None] = {}  # in execution order
        self._counts = Counter[Site]()
        self._tensors = defaultdict[Site, dict[str, torch.Tensor]](dict)

    def finish_layer(self, layer: Layer) -> None:
        """Finish a layer of a streamed model that all batches have run through."""

    # --- hooks ------------------------------------------------------------------------------------

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Record K and V per head."""
        for role, x in ((Role.K, key), (Role.V, value)):
            seen = reduce_tokens(self.batch, x, attention.num_kv_heads, 1)
            self._pending.append((attention.site(role), seen))
        return key, value

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Record q per head."""
        seen = reduce_tokens(self.batch, query, query.shape[1], 0)
        self._pending.append((attention.site(Role.Q), seen))
        return query

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Record the input of a linear per channel, reduced once for all that read the tensor."""
        site = Site(linear.module, Role.INPUT)
        seen = next((s for t, v, s in self._last_inputs if t is x and v == x._version), None)
        if seen is None:
            seen = observe_input(self.batch, site, x)
            self._last_inputs.append((x, x._version, seen))
            del self._last_inputs[:-_REMEMBERED_INPUTS]
        self._pending.append((site, seen))
        return x

    def on_expert_input(
        self, linears: Sequence[Linear], index: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Record the input of gate and up per channel and per expert."""
        sites = [Site(linear.module, Role.INPUT) for linear in linears]
        num_experts = linears[0].num_experts
        seen = observe_expert_input(self.batch, sites[0], hidden, index, num_experts)
        self._pending.extend((site, seen) for site in sites)
        return hidden

    def on_expert_down(
        self, linear: Linear, index: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Record the input of down per channel and per expert."""
        sizes = linear.num_experts, linear.expert_block
        seen = observe_expert_down(self.batch, rows, index, *sizes)
        self._pending.append((Site(linear.module, Role.INPUT), seen))
        return rows

    def record(self, site: Site, seen: SiteStats) -> None:
        """Add what was reduced without a hook."""
        self._pending.append((site, seen))

    # --- batches ----------------------------------------------------------------------------------

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch; one that has not ended is discarded."""
        self._pending.clear()
        self._last_inputs.clear()
        self.batch = batch

    def end_batch(self) -> None:
        """Add the observations of the batch to the running statistics, many in one kernel."""
        groups = defaultdict[tuple[int, bool, torch.device], tuple[list[torch.Tensor], ...]](
            lambda: ([], [])
        )
        earlier = Counter[int]()  # no kernel adds two tensors to the same running one
        for site, seen in self._pending:
            self._counts[site] += seen.count
            tensors = self._tensors[site]
            for name, new in seen.tensors.items():
                of_run = name == "sequences"
                if name not in tensors:
                    length = self._num_sequences if of_run else LENGTHS.get(name)
                    tensors[name] = new.new_zeros(new.shape if length is None else (length,))
                start = self.batch.first if of_run else 0
                running = tensors[name][start : start + len(new)]
                place = running.data_ptr()
                totals, news = groups[earlier[place], name in COUNTS, running.device]
                totals.append(running)
                news.append(new.to(running.device))
                earlier[place] += 1
            self._unchecked_sites[site] = None
        for (_, is_count, _), (totals, news) in groups.items():
            (torch._foreach_add_ if is_count else torch._foreach_maximum_)(totals, news)
        sequences = self.batch.first, self.batch.first + self.batch.shape[0]
        self._unchecked.append(sequences)
        self.sequences += (sequences,)
        self._pending.clear()
        self._last_inputs.clear()

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
        on_devices = defaultdict[torch.device, list[torch.Tensor]](list)
        for x in found.values():
            on_devices[x.device].append(x)
        if all(bool(torch.cat(all_x).isfinite().all()) for all_x in on_devices.values()):
            return None  # after one wait for each device
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
