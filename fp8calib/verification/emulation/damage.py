"""Measure what quantization does to tensors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch

from fp8calib.numerics.amax import tensor_amax
from fp8calib.verification.emulation.fake_quantize import FakeQuantized

_SAFE_SUM = 1e-20
"""Beside a larger sum, squares that underflow in fp32 do not count."""


class Damage(NamedTuple):
    """What quantization did to the elements of a tensor, from the sums of `measure_damage`."""

    signal: float
    """The sum of x squared."""
    noise: float
    """The sum of (quantized x - x) squared."""
    clipped: float
    """How many exceeded the largest value of the format."""
    flushed: float
    """How many nonzero elements became zero."""
    num_elements: float
    amax: float

    @property
    def sqnr_db(self) -> float | None:
        """The signal-to-quantization-noise ratio; None without noise or without signal."""
        if not self.signal or not self.noise:
            return None
        return 10 * math.log10(self.signal / self.noise)

    @property
    def shares(self) -> tuple[float, float]:
        """The shares of all elements that clipped, and that became zero."""
        return self.clipped / max(self.num_elements, 1), self.flushed / max(self.num_elements, 1)


@torch.no_grad()  # a caller of `emulate` may compute gradients
def measure_damage(x: torch.Tensor, fake: FakeQuantized, *, flush_stride: int = 1) -> torch.Tensor:
    """Sum up what quantization did to `x`: fp64 [6] on its device, in the order of `Damage`.

    Zeros are counted in one of `flush_stride` tokens (the last axis but one) and extrapolated:
    counting them takes longer than everything else.
    """
    exact = x.float()
    clipped = torch.zeros((), dtype=torch.float64, device=x.device)
    if fake.clips is not None:
        clipped = fake.clips.sum(dtype=torch.float64)
    tokens = (..., slice(None, None, flush_stride), slice(None)) if flush_stride > 1 else ...
    chosen, became = exact[tokens], fake.values[tokens]
    # A cache type that rotates makes zeros of one value and others of zeros.
    flushed = (chosen.count_nonzero() - became.count_nonzero()).clamp(min=0).double()
    sums = (
        _sum_squares(exact),
        _sum_squares(fake.values - exact),
        clipped,
        flushed * (exact.numel() / max(chosen.numel(), 1)),
        torch.full((), x.numel(), dtype=torch.float64, device=x.device),
        tensor_amax(x).double(),
    )
    return torch.stack(sums)


def _sum_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum x squared: fp64 0-dim, right for every magnitude of fp32.

    On a CPU fp32 takes half the time, and of a contiguous tensor the dot product takes half that of
    the norm; fp64 serves where squares overflow, or underflow and count.
    """
    if x.device.type == "cpu":
        if x.is_contiguous():
            total = torch.dot(x.view(-1), x.view(-1)).double()
        else:
            total = torch.linalg.vector_norm(x).double().square()
        if _SAFE_SUM < total.item() < math.inf:
            return total
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


@torch.no_grad()
def measure_heads(x: torch.Tensor, fake: FakeQuantized) -> torch.Tensor:
    """Sum up what quantization did to each head of `x` [H, N, D]: fp64 [H, 6], as `Damage`."""
    axes = (1, 2)
    exact, became = x.float(), fake.values.float()
    signal = torch.linalg.vector_norm(exact, dim=axes, dtype=torch.float64).square()
    noise = torch.linalg.vector_norm(became - exact, dim=axes, dtype=torch.float64).square()
    clipped = torch.zeros_like(signal) if fake.clips is None else fake.clips.sum(axes).double()
    flushed = ((became == 0) & (exact != 0)).sum(axes).double()
    count = torch.full_like(signal, x[0].numel())
    return torch.stack([signal, noise, clipped, flushed, count, exact.abs().amax(axes)], 1)


def sum_damage(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add results of `measure_damage` or `measure_heads`, whose last element is a maximum."""
    stacked = torch.stack(list(parts))
    return torch.cat([stacked[..., :-1].sum(0), stacked[..., -1:].amax(0)], -1)


# --- many tensors ------------------------------------------------------------------------------

_MOST_ROWS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SummedDamage:
    """The damage to a tensor, summed up by each program of a kernel."""

    sums: torch.Tensor
    """fp64 [N, 6]: x squared, the error squared, how many elements clipped, how many of the chosen
    are not zero before and after, and the amax."""
    num_elements: int
    num_chosen: int


DamageRow = torch.Tensor | SummedDamage
"""The damage to one tensor, as `measure_damage` gives it or still to be reduced."""


Key = TypeVar("Key")


class DamageSums(Generic[Key]):
    """Sums up the damage to many tensors by key.

    What kernels summed up waits until `settle`, which reduces many tensors in one kernel.
    """

    def __init__(self) -> None:
        self.totals: dict[Key, torch.Tensor] = {}
        """The sums of `measure_damage`; complete after `settle`."""
        self._rows: list[tuple[Key, DamageRow]] = []

    def add(self, key: Key, row: DamageRow) -> None:
        """Add the damage to one tensor."""
        self._rows.append((key, row))
        if len(self._rows) >= _MOST_ROWS:
            self.settle()

    def drop(self) -> None:
        """Forget what was added since `settle`."""
        self._rows.clear()

    def settle(self) -> None:
        """Add all that waits to the totals."""
        alike = defaultdict[tuple[torch.device, torch.Size], dict[int, SummedDamage]](dict)
        for _, row in self._rows:
            if isinstance(row, SummedDamage):  # several keys may have the same
                alike[row.sums.device, row.sums.shape][id(row)] = row
        reduced: dict[int, torch.Tensor] = {}
        for parts in alike.values():
            reduced |= zip(parts, _reduce_summed(list(parts.values())), strict=True)
        rows = [
            (k, row if isinstance(row, torch.Tensor) else reduced[id(row)]) for k, row in self._rows
        ]
        self.drop()
        while rows:  # each key once at a time
            later: list[tuple[Key, torch.Tensor]] = []
            groups = defaultdict[torch.device, dict[Key, tuple[torch.Tensor, torch.Tensor]]](dict)
            for key, row in rows:
                total = self.totals.get(key)
                if total is None:
                    self.totals[key] = row
                elif key in groups[total.device]:
                    later.append((key, row))
                else:
                    groups[total.device][key] = total, row.to(total.device)
            for group in groups.values():
                totals, new = zip(*group.values(), strict=True)
                one, other = torch.stack([*totals, *new]).chunk(2)  # three kernels in all on a GPU
                joined = one + other
                torch.maximum(one[..., -1], other[..., -1], out=joined[..., -1])
                self.totals |= zip(group, joined.unbind(), strict=True)
            rows = later


def _reduce_summed(parts: Sequence[SummedDamage]) -> Sequence[torch.Tensor]:
    """Give the rows of tensors whose kernels had as many programs."""
    stacked = torch.stack([each.sums for each in parts])
    signal, noise, clipped, before, after, _ = stacked.sum(1).unbind(1)
    sizes = [(each.num_elements, each.num_elements / each.num_chosen) for each in parts]
    on_host = torch.tensor(sizes, dtype=torch.float64)
    num_elements, factor = on_host.to(stacked.device, non_blocking=True).unbind(1)
    flushed = (before - after).clamp(min=0) * factor
    rows = (signal, noise, clipped, flushed, num_elements, stacked[..., -1].amax(1))
    return torch.stack(rows, 1).unbind(0)
