"""The scales of one tensor as a report shows them: their granularity and their extremes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from fp8calib.fp8.schemes import Granularity
from fp8calib.geometry.sites import Site
from fp8calib.verification.emulation.fake_quantize import Quantizer

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
