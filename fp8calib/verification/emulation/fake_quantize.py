"""Fake-quantize one tensor and measure the damage: tensors in, tensors out.

Shapes: B batch, H heads, S sequence, D head size, C channels, O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Self

import torch

from fp8calib.fp8.amax import block_amax, group_amax, row_amax, tensor_amax
from fp8calib.fp8.cast import round_to_format_
from fp8calib.fp8.formats import Fp8Format, Rounding
from fp8calib.fp8.schemes import BLOCK, GROUP_SIZE, Granularity
from fp8calib.geometry.sites import Site
from fp8calib.scales.scale_table import SMALLEST_SCALE, scale_of

_SAFE_SUM = 1e-20
"""Beside a larger sum, squares that underflow in fp32 do not count."""
_AT_THE_EDGE = 1 + 2.0**-20
"""amax / scale, both rounded to fp32, may exceed fmt.max by this factor."""


class FakeQuantized(NamedTuple):
    """A fake-quantized tensor, and what is needed to measure its damage."""

    values: torch.Tensor
    """Quantized and dequantized, fp32."""
    scaled: torch.Tensor | None
    """x / scale before saturation, fp32, the shape of `values`; None where nothing exceeds the
    largest value of the format."""
    amax: torch.Tensor | None = None
    """Largest magnitude of x, fp32; None where it was not computed."""

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> FakeQuantized:
        """Apply `change`, which selects elements, to both tensors."""
        return FakeQuantized(
            change(self.values), None if self.scaled is None else change(self.scaled)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantizer:
    """How an engine quantizes and dequantizes one tensor."""

    fmt: Fp8Format
    scale: torch.Tensor | Granularity
    """Static: fp32 that broadcasts to the tensor. Dynamic: what shares a scale."""
    block: tuple[int, int] = BLOCK
    """Rows and columns that share a dynamic scale, where the granularity is `BLOCK`."""
    rounding: Rounding = Rounding.NEAREST_EVEN
    smallest_scale: float = SMALLEST_SCALE
    """Lower bound of dynamic scales."""
    largest_amax: float | None = None
    """Largest magnitude that a dynamic scale covers (fbgemm's upper bound)."""
    by_reciprocal: bool = False
    """Multiply by 1 / scale (fp32) instead of dividing."""
    in_model_dtype: bool = False
    """Divide in the tensor's own dtype, with the scale rounded to it."""
    power_of_two: bool = False
    """Round dynamic scales up to powers of two."""
    saturates: bool = True
    """Whether the engine saturates; if not, it turns too large values into NaN or infinity. The
    emulation always saturates, so a report has to say so."""

    def for_heads(self, num_heads: int) -> Quantizer:
        """Repeat per-head scales where a model repeats its KV heads before caching them."""
        scale = self.scale
        if not isinstance(scale, torch.Tensor) or not scale.ndim or len(scale) == num_heads:
            return self
        return replace(self, scale=scale.repeat_interleave(num_heads // len(scale), 0))

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
        scale = self.scale_for(x)
        scaled = self.divide(x, scale)
        limit = self.fmt.max * _AT_THE_EDGE
        amax = None
        if scale.numel() == 1 and x.numel():  # one scale keeps the order of magnitudes
            amax = tensor_amax(x.detach())
            largest = self.divide(amax.to(x.dtype), scale)
        else:
            largest = scaled
        before = None if _is_within(largest, limit) else scaled.clone()
        values = round_to_format_(scaled, self.fmt, self.rounding, saturate=before is not None)
        return FakeQuantized(values.mul_(scale), before, amax)

    def scale_for(self, x: torch.Tensor) -> torch.Tensor:
        """Give the scale of each element: fp32, broadcasts to `x`."""
        if isinstance(self.scale, torch.Tensor):
            return self.scale.to(x.device)
        amax = _broadcast_amax(x.detach(), self.scale, self.block)
        if self.largest_amax is not None:
            amax = amax.clamp(max=self.largest_amax)
        scale = scale_of(amax, self.fmt).clamp(min=self.smallest_scale)
        return torch.exp2(scale.log2().ceil()) if self.power_of_two else scale

    def divide(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        """Compute x / scale as the engine does: a new fp32 tensor."""
        if self.in_model_dtype:
            return (x / scale.to(x.dtype)).float()
        if self.by_reciprocal:
            return x.float() * scale.reciprocal()
        return x.float() / scale


def _broadcast_amax(
    x: torch.Tensor, granularity: Granularity, block: tuple[int, int]
) -> torch.Tensor:
    """Find the largest magnitude of what shares a scale: fp32, broadcasts to `x`."""
    if granularity is Granularity.TENSOR:
        return tensor_amax(x)
    if granularity is Granularity.GROUP:
        return group_amax(x, GROUP_SIZE).repeat_interleave(GROUP_SIZE, -1)[..., : x.shape[-1]]
    if granularity is Granularity.BLOCK:
        rows, columns = block
        spread = block_amax(x, block).repeat_interleave(columns, -1).repeat_interleave(rows, -2)
        return spread[..., : x.shape[-2], : x.shape[-1]]
    return row_amax(x).unsqueeze(-1)


Per = Granularity | Literal["head"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRange:
    """The granularity of scales, and their extremes; None for scales computed at run time."""

    per: Per
    smallest: float | None = None
    largest: float | None = None

    @classmethod
    def of(cls, scale: torch.Tensor, *, per: Per) -> Self:
        """Take the extremes of scales in any shape."""
        smallest, largest = torch.aminmax(scale)
        return cls(per=per, smallest=float(smallest), largest=float(largest))

    def join(self, other: Self) -> Self:
        """Cover the scales of both (of two experts, say)."""
        if None in (self.smallest, self.largest, other.smallest, other.largest):
            return type(self)(per=self.per)
        both = torch.tensor([self.smallest, self.largest, other.smallest, other.largest])
        return type(self).of(both, per=self.per)


def find_ranges(quantizers: Mapping[Site, Quantizer]) -> dict[Site, ScaleRange]:
    """Find the scales of K, V, q and inputs; of those computed at run time only the granularity.

    K, V and q have one scale, or one per head (ranks that differ give their heads different ones).
    """
    return {site: _find_range(quantizer) for site, quantizer in quantizers.items()}


def _find_range(quantizer: Quantizer) -> ScaleRange:
    scale = quantizer.scale
    if isinstance(scale, Granularity):
        return ScaleRange(per=scale)
    return ScaleRange.of(scale, per=Granularity.TENSOR if scale.numel() == 1 else "head")


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
    def clipped_share(self) -> float:
        """The share of all elements that clipped."""
        return self.clipped / self.num_elements if self.num_elements else 0.0

    @property
    def flushed_share(self) -> float:
        """The share of all elements that became zero."""
        return self.flushed / self.num_elements if self.num_elements else 0.0


def measure_damage(
    x: torch.Tensor,
    fake: FakeQuantized,
    fmt: Fp8Format,
    *,
    saturates: bool = True,
    flush_stride: int = 1,
) -> torch.Tensor:
    """Sum up what quantization did to `x`: fp64 [6] on its device, in the order of `Damage`.

    Zeros are counted in one of `flush_stride` tokens (the last axis but one) and extrapolated:
    counting them takes longer than everything else. Without `saturates`, only values that would
    round beyond the largest one count as clipped.
    """
    limit = fmt.max * _AT_THE_EDGE if saturates else fmt.overflow
    exact = x.float()
    sums = (
        _sum_squares(exact),
        _sum_squares(fake.values - exact),
        _count_beyond(fake.scaled, limit, x.device),
        _count_flushed(exact, fake.values, flush_stride),
        torch.tensor(x.numel(), dtype=torch.float64, device=x.device),
        (tensor_amax(x.detach()) if fake.amax is None else fake.amax).double(),
    )
    return torch.stack(sums)


def _sum_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum x squared: fp64 0-dim, right for every magnitude of fp32.

    On a CPU fp32 takes half the time; fp64 serves where squares overflow, or underflow and count.
    """
    if x.device.type == "cpu":
        total = _sum_squares_in_fp32(x)
        if _SAFE_SUM < total.item() < math.inf:
            return total
    norm: torch.Tensor = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm.square()


def _sum_squares_in_fp32(x: torch.Tensor) -> torch.Tensor:
    """Sum x squared. For a contiguous tensor the dot product takes half the time of the norm."""
    if x.is_contiguous():
        flat = x.view(-1)
        total: torch.Tensor = torch.dot(flat, flat)
        return total.double()
    norm: torch.Tensor = torch.linalg.vector_norm(x)
    return norm.double().square()


def _count_flushed(exact: torch.Tensor, values: torch.Tensor, stride: int) -> torch.Tensor:
    chosen, became = exact, values
    if stride > 1:
        chosen, became = exact[..., ::stride, :], values[..., ::stride, :]
    flushed = (chosen.count_nonzero() - became.count_nonzero()).double()
    return flushed * (exact.numel() / max(chosen.numel(), 1))


def _is_within(x: torch.Tensor, limit: float) -> bool:
    """Tell whether no magnitude exceeds `limit`; False on a GPU, where asking would synchronize."""
    return x.device.type == "cpu" and (not x.numel() or tensor_amax(x).item() <= limit)


def _count_beyond(x: torch.Tensor | None, limit: float, device: torch.device) -> torch.Tensor:
    if x is None:
        return torch.zeros((), dtype=torch.float64, device=device)
    return (x.abs() > limit).sum(dtype=torch.float64)


def add_damage(total: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    """Add a result of `measure_damage` to the sum of earlier ones, if there are any."""
    if total is None:
        return new
    return sum_damage([total, new.to(total.device)])


def sum_damage(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Add results of `measure_damage`, whose last element is a maximum: fp64 [6]."""
    stacked = torch.stack(list(parts))
    return torch.cat([stacked[:, :-1].sum(0), stacked[:, -1:].amax(0)])
