"""Fake-quantize tensors, and measure what that does to them: tensors in, tensors out.

Shapes: B batch, H heads, S sequence, D head size, C channels, O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from fp8calib.numerics.amax import amax_over, block_amax, group_amax, tensor_amax
from fp8calib.numerics.cast import round_to_format_
from fp8calib.numerics.encode import power_of_two_scale_of, scale_of
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format, Rounding
from fp8calib.numerics.schemes import BLOCK, MX_BLOCK, Granularity

RoundTrip = Callable[[torch.Tensor], torch.Tensor]
"""Stores vectors of tokens and heads [..., D] and reads them back: fp32 of that shape."""
AT_THE_EDGE = 1 + 2.0**-20
"""amax / scale, both rounded to fp32, may exceed fmt.max by this factor."""


class FakeQuantized(NamedTuple):
    """A fake-quantized tensor, and what is needed to measure its damage."""

    values: torch.Tensor
    """Quantized and dequantized, fp32."""
    clips: torch.Tensor | None
    """Which elements exceed the largest value of the format: bool, the shape of `values`; None
    where none can."""
    scale: torch.Tensor | None = None
    """The scale of each element, as `Quantizer.scale_for`; None if a cache type has its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How an engine quantizes and dequantizes one tensor."""

    fmt: Fp8Format
    scale: torch.Tensor | Granularity
    """Static: fp32 that broadcasts to the tensor. Dynamic: what shares a scale."""
    block: tuple[int, int] = BLOCK
    """Rows and columns that share a dynamic scale, where the granularity is `BLOCK`; of `GROUP`
    the columns are the group's."""
    rounding: Rounding = "nearest-even"
    smallest_scale: float = SMALLEST_SCALE
    """Lower bound of dynamic scales."""
    largest_amax: float | None = None
    """Largest magnitude that a dynamic scale covers (fbgemm's upper bound)."""
    by_reciprocal: bool = False
    """Multiply by 1 / scale (fp32) instead of dividing."""
    in_model_dtype: bool = False
    """Divide in the tensor's own dtype, with the scale rounded to it."""
    scale_by_reciprocal: bool = False
    """Multiply the amax by 1 / fmt.max (fp32) instead of dividing, for a dynamic scale."""
    power_of_two: bool = False
    """Round dynamic scales up to powers of two."""
    tile: int = 0
    """For numerators of softmax: how many keys are taken at a time, the last ones first; 0: all."""
    saturates: bool = True
    """Whether the engine saturates; if not, it turns too large values into NaN or infinity. The
    emulation always saturates, so a report has to say so."""
    is_scaled: bool = False
    """Whether the engine would use another scale here than 1.0."""
    round_trip: RoundTrip | None = None
    """How a cache type stores and reads the tensor. Then nothing clips, and of the other fields
    only `scale` says something: what shares one."""

    def to(self, device: torch.device) -> Quantizer:
        """Copy static scales to a GPU, with an axis, so that they divide half floats in fp32."""
        if not isinstance(self.scale, torch.Tensor):
            return self
        scale = self.scale.reshape(self.scale.shape or (1,))
        return replace(self, scale=scale.to(device, non_blocking=True))

    def fitted_to(self, heads: torch.Tensor) -> Quantizer:
        """Multiply each static scale by the smallest power of two with which nothing clips.

        `heads` [H, N, D] are what it scales, whole or by head.
        """
        scale = self.scale
        assert isinstance(scale, torch.Tensor)  # noqa: S101 -- of K, V and q in every candidate
        scale = scale.to(heads.device)
        amax = heads.float().abs().amax((1, 2), keepdim=True)
        if scale.numel() == 1:
            amax = amax.max().reshape(scale.shape)
        codes = amax / scale / self.fmt.max
        # The edge: amax / scale, both rounded, may exceed the largest value by a rounding error.
        octaves = torch.where(codes > 0, (codes / AT_THE_EDGE).log2().ceil(), 0.0)
        return replace(self, scale=scale * torch.exp2(octaves), saturates=True)

    @property
    def clip_limit(self) -> float:
        """The magnitude in codes above which a value clips.

        It is infinite where scales of the values themselves cover all. An engine that does not
        saturate turns only values that would round beyond the largest one into others.
        """
        is_free = isinstance(self.scale, Granularity) and not self.power_of_two
        if is_free and self.largest_amax is None:
            return math.inf
        return self.fmt.max * AT_THE_EDGE if self.saturates else self.fmt.overflow

    @property
    def fits_kernel(self) -> bool:
        """Whether the kernel of a GPU computes it; torch's operations compute everything."""
        scale = self.scale
        if self.round_trip is not None or self.rounding != "nearest-even":
            return False
        if isinstance(scale, torch.Tensor):
            return scale.numel() in {1, *scale.shape[-3:-2]}
        if scale is Granularity.TENSOR:  # found by torch's operations before
            return True
        is_group = scale is Granularity.GROUP and self.block in {BLOCK, MX_BLOCK}
        return (scale is Granularity.TOKEN or is_group) and not self.in_model_dtype

    def is_same(self, other: Quantizer) -> bool:
        """Tell whether both quantize every tensor alike."""
        if self is other:
            return True
        a, b = self.scale, other.scale
        if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
            is_equal = a.shape == b.shape and torch.equal(a, b)
            return is_equal and replace(self, scale=b) == other
        return a is b and self == other

    def fake(self, x: torch.Tensor) -> FakeQuantized:
        """Quantize and dequantize in fp32, and keep what measuring the damage needs."""
        if self.round_trip is not None:
            return FakeQuantized(self.round_trip(x), None)
        scale = self.scale_for(x)
        if self.in_model_dtype:
            scaled = (x / scale.to(x.dtype)).float()
        else:
            exact = x if x.device.type != "cpu" and scale.dim() else x.float()
            scaled = exact * scale.reciprocal() if self.by_reciprocal else exact / scale
        clips = None
        if (limit := self.clip_limit) < math.inf:
            clips = scaled.abs() > limit
            scaled.clamp_(-self.fmt.max, self.fmt.max)
        values = round_to_format_(scaled, self.fmt, self.rounding, saturate=False)
        return FakeQuantized(values.mul_(scale), clips, scale)

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        """Give the scale of each element: fp32, broadcasts to `x`."""
        if isinstance(self.scale, torch.Tensor):
            return self.scale.to(x.device)
        amax = _broadcast_amax(x.detach(), self.scale, self.block)
        if self.largest_amax is not None:
            amax = amax.clamp(max=self.largest_amax)
        if self.scale_by_reciprocal:
            return (amax * (1 / torch.tensor(self.fmt.max)).item()).clamp(min=self.smallest_scale)
        rule = power_of_two_scale_of if self.power_of_two else scale_of
        return rule(amax, self.fmt, smallest=self.smallest_scale)


def _broadcast_amax(
    x: torch.Tensor, granularity: Granularity, block: tuple[int, int]
) -> torch.Tensor:
    """Find the largest magnitude of what shares a scale: fp32, broadcasts to `x`."""
    if granularity is Granularity.TENSOR:
        return tensor_amax(x)
    if granularity is Granularity.GROUP:
        size = block[1]
        return group_amax(x, size).repeat_interleave(size, -1)[..., : x.shape[-1]]
    if granularity is Granularity.BLOCK:
        rows, columns = block
        spread = block_amax(x, block).repeat_interleave(columns, -1).repeat_interleave(rows, -2)
        return spread[..., : x.shape[-2], : x.shape[-1]]
    return amax_over(x, -1).unsqueeze(-1)


# --- the damage to a tensor ----------------------------------------------------------------------

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


DamageRow = torch.Tensor | tuple[torch.Tensor, int, int]
"""The damage to one tensor: as `measure_damage` gives it; or fp64 [N, 6], one row of each program
of a kernel, with the number of elements, and of those in which zeros are counted. A row has x
squared, the error squared, how many clipped, how many of the chosen were not zero, how many of them
are not zero now, and the largest magnitude."""


def add_damage(totals: dict[Any, torch.Tensor], rows: Iterable[tuple[Any, DamageRow]]) -> None:
    """Add the damage to tensors, by their keys, to `totals`, the sums of `measure_damage`.

    A GPU runs few kernels: many tensors are reduced together, and added together.
    """
    waiting = defaultdict[Any, list[torch.Tensor]](list)
    rows = list(rows)
    alike = defaultdict[tuple[torch.device, torch.Size], dict[int, Any]](dict)
    for _, row in rows:
        if isinstance(row, tuple):  # several keys may have the same
            alike[row[0].device, row[0].shape][id(row)] = row
    reduced: dict[int, torch.Tensor] = {}
    for summed in alike.values():
        reduced |= zip(summed, _reduce_summed(list(summed.values())), strict=True)
    for key, row in rows:
        waiting[key].append(reduced[id(row)] if isinstance(row, tuple) else row)
    for key, parts in waiting.items():
        if key not in totals:
            totals[key] = parts.pop(0)
    while any(waiting.values()):  # each key once at a time
        groups = defaultdict[torch.device, list[Any]](list)
        for key in (key for key, parts in waiting.items() if parts):
            groups[totals[key].device].append(key)
        for device, keys in groups.items():
            new = [waiting[key].pop(0).to(device) for key in keys]
            one, other = torch.stack([*(totals[key] for key in keys), *new]).chunk(2)
            joined = one + other
            torch.maximum(one[..., -1], other[..., -1], out=joined[..., -1])
            totals.update(zip(keys, joined.unbind(), strict=True))


def _reduce_summed(parts: Sequence[tuple[torch.Tensor, int, int]]) -> Sequence[torch.Tensor]:
    """Give the rows of tensors whose kernels had as many programs."""
    stacked = torch.stack([sums for sums, _, _ in parts])
    signal, noise, clipped, before, after, _ = stacked.sum(1).unbind(1)
    sizes = [(count, count / chosen) for _, count, chosen in parts]
    on_host = torch.tensor(sizes, dtype=torch.float64)
    num_elements, factor = on_host.to(stacked.device, non_blocking=True).unbind(1)
    flushed = (before - after).clamp(min=0) * factor
    rows = (signal, noise, clipped, flushed, num_elements, stacked[..., -1].amax(1))
    return torch.stack(rows, 1).unbind(0)
