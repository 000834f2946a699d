"""Sum up the Hessians of linears' inputs, batch by batch, apart for used and held-back tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.recorder import Recorder
from fp8calib.model.geometry import Linear

HELD_EVERY = 8
"""One sequence of this many is held back, to measure the error of a rounding on it."""
LENGTH_POWER = 0.25
"""Tokens enter a Hessian with this power of their length; 0 would make all lengths 1. The first
token of a sequence can be a thousand times as long as others, and would dominate the Hessian."""
_BLOCK = 192
"""Rows of a Hessian that are added at once, from the diagonal on."""
_REMEMBERED = 4
"""How many inputs of a batch are remembered: the next linear may read the same tensor."""
_PADDING, _USED, _HELD = range(3)


@dataclass(slots=True)
class HessianSums:
    """The sums of x x^T over the weighted tokens x of one input: fp32 [in, in] each.

    Complete after `mirror`.
    """

    used: torch.Tensor
    held: torch.Tensor
    num_used: int = 0
    num_held: int = 0

    def add(self, rows: torch.Tensor, *, is_held: bool) -> None:
        """Add tokens [N, in]."""
        if not len(rows):
            return
        wide = rows.to(torch.float32)
        lengths = torch.linalg.vector_norm(wide, dim=1, keepdim=True)
        wide = wide * lengths.clamp_min(torch.finfo(wide.dtype).tiny).pow(LENGTH_POWER - 1)
        if is_held:
            self.num_held += len(rows)
        else:
            self.num_used += len(rows)
        total = self.held if is_held else self.used
        for first in range(0, len(total), _BLOCK):
            block = slice(first, first + _BLOCK)
            total[block, first:].addmm_(wide[:, block].T, wide[:, first:])

    def mirror(self) -> None:
        """Fill the blocks below the diagonal, which `add` leaves out: both sums are symmetric."""
        for total in (self.used, self.held):
            for first in range(0, len(total), _BLOCK):
                stop = first + _BLOCK
                total[stop:, first:stop] = total[first:stop, stop:].T


def expert_key(path: str, expert: int, *, is_down: bool) -> str:
    """Name the input of an expert: of gate and up, or of down."""
    return f"{path}.{expert}.{'down' if is_down else 'in'}"


@dataclass(slots=True)
class LayerHessians:
    """The Hessians of a layer's inputs."""

    sums: dict[str, HessianSums] = field(default_factory=dict)
    """Input -> its sums. An input is named by its first linear, or by `expert_key`."""
    owners: dict[str, str] = field(default_factory=dict)
    """Linear -> input."""
    changing: set[str] = field(default_factory=set)
    """Linears that read the input of another linear in some batches and not in others."""


class HessianRecorder(Recorder):
    """Also sums up a Hessian for each distinct input of linears."""

    def __init__(self, wanted: Collection[str], num_sequences: int) -> None:
        """Sum up for linears and modules of experts with these paths."""
        self.wanted = set(wanted)
        self._layer = LayerHessians()
        self._statuses = torch.zeros(0)
        self._recent: list[tuple[torch.Tensor, int, str]] = []
        super().__init__(num_sequences)

    def take(self) -> LayerHessians:
        """Return the collected Hessians, and start a new collection."""
        taken, self._layer = self._layer, LayerHessians()
        self._recent.clear()
        for sums in taken.sums.values():
            sums.mirror()
        return taken

    def begin_batch(self, batch: BatchView) -> None:
        """Open a batch."""
        super().begin_batch(batch)
        self._statuses = _find_statuses(batch)
        self._recent.clear()

    def on_input(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """Receive the input of a linear: [..., C]."""
        super().on_input(linear, x)
        if linear.module in self.wanted and not self._is_shared(linear.module, x):
            rows = x.reshape(-1, x.shape[-1])
            self._add(linear.module, rows, self._status_of(rows, len(rows)))
        return x

    def on_expert_input(
        self, linears: Sequence[Linear], index: torch.Tensor, hidden: torch.Tensor
    ) -> torch.Tensor:
        """Receive the input of gate and up: [N, C]."""
        super().on_expert_input(linears, index, hidden)
        path = linears[0].runner
        if path not in self.wanted:
            return hidden
        experts, order = torch.sort(index.flatten(), stable=True)
        tokens = order // index.shape[1]
        for expert, first, stop in _list_runs(experts, linears[0].num_experts):
            chosen = tokens[first:stop]
            key = expert_key(path, expert, is_down=False)
            self._add(key, hidden[chosen], self._status_of(hidden, len(hidden))[chosen])
        return hidden

    def on_expert_down(
        self, linear: Linear, index: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Receive the input of down, its rows sorted by expert: [N * K, C]."""
        super().on_expert_down(linear, index, rows)
        if linear.runner not in self.wanted:
            return rows
        experts, order = torch.sort(index.flatten())  # as `observe_expert_down`
        status = self._status_of(rows, len(index))[order // index.shape[1]]
        for expert, first, stop in _list_runs(experts, linear.num_experts):
            key = expert_key(linear.runner, expert, is_down=True)
            self._add(key, rows[first:stop], status[first:stop])
        return rows

    def _is_shared(self, module: str, x: torch.Tensor) -> bool:
        """Tell whether another linear has added the same tensor already."""
        found = next((o for t, v, o in self._recent if t is x and v == x._version), None)
        owner = self._layer.owners.setdefault(module, found or module)
        if owner != module:
            if found != owner:
                self._layer.changing.add(module)
            return True
        self._recent.append((x, x._version, module))
        del self._recent[:-_REMEMBERED]
        return False

    def _status_of(self, rows: torch.Tensor, count: int) -> torch.Tensor:
        """Give the status of `count` tokens, or padding if they do not match those of the batch."""
        statuses = self._statuses.to(rows.device)
        if count == len(statuses):
            return statuses
        if count % len(statuses) == 0:
            return statuses.repeat(count // len(statuses))
        only = statuses[0] if bool((statuses == statuses[0]).all()) else _PADDING
        return statuses.new_full((count,), int(only))

    def _add(self, key: str, rows: torch.Tensor, status: torch.Tensor) -> None:
        sums = self._layer.sums.get(key)
        if sums is None:
            size = rows.shape[1]
            used, held = (torch.zeros(size, size, device=rows.device) for _ in range(2))
            sums = self._layer.sums[key] = HessianSums(used, held)
        for which in (_USED, _HELD):
            chosen = status == which
            part = rows if bool(chosen.all()) else rows[chosen]
            sums.add(part, is_held=which == _HELD)


def _find_statuses(batch: BatchView) -> torch.Tensor:
    """Give for every row of a batch whether it is padding, used or held back: int64 [B * S]."""
    sequences = torch.arange(batch.first, batch.first + batch.shape[0])
    held = sequences % HELD_EVERY == HELD_EVERY - 1
    statuses = torch.where(held, _HELD, _USED).repeat_interleave(batch.shape[1])
    return statuses.masked_fill(batch.padding(statuses.device).flatten(), _PADDING)


def _list_runs(experts: torch.Tensor, count: int) -> list[tuple[int, int, int]]:
    """List the runs of equal numbers in a sorted tensor: (expert, first, stop)."""
    sizes = torch.bincount(experts, minlength=count).tolist()
    runs, first = [], 0
    for expert, size in enumerate(sizes):
        if size:
            runs.append((expert, first, first + size))
        first += size
    return runs
