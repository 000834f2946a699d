"""Fake-quantize one tensor: tensors in, tensors out.

Shapes: B batch, H heads, S sequence, D head size, C channels, O outputs, I inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from fp8calib.numerics.amax import block_amax, group_amax, row_amax, tensor_amax
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
    rounding: Rounding = Rounding.NEAREST_EVEN
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
    round_trip: RoundTrip | None = None
    """How a cache type stores and reads the tensor. Then nothing clips, and of the other fields
    only `scale` says something: what shares one."""

    def to(self, device: torch.device) -> Quantizer:
        """Copy static scales to a GPU, with an axis, so that they divide half floats in fp32."""
        if not isinstance(self.scale, torch.Tensor):
            return self
        scale = self.scale.reshape(self.scale.shape or (1,))
        return replace(self, scale=scale.to(device, non_blocking=True))

    def for_heads(self, num_heads: int) -> Quantizer:
        """Repeat per-head scales where a model repeats its KV heads before caching them."""
        scale = self.scale
        if not isinstance(scale, torch.Tensor) or scale.ndim < 2 or len(scale) == num_heads:
            return self
        return replace(self, scale=scale.repeat_interleave(num_heads // len(scale), 0))

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
        if self.round_trip is not None or self.rounding is not Rounding.NEAREST_EVEN:
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
    return row_amax(x).unsqueeze(-1)
