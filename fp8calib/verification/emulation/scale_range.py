"""The scales of one tensor as a report shows them: what shares one, and from which to which."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Self

import torch

from fp8calib.fp8.schemes import Dynamic
from fp8calib.geometry.sites import Site
from fp8calib.verification.emulation.fake_quantize import Quantizer

Per = Literal["tensor", "head", "channel", "block", "token", "group"]
_PER: Mapping[Dynamic, Per] = {
    Dynamic.TENSOR: "tensor",
    Dynamic.TOKEN: "token",
    Dynamic.GROUP: "group",
    Dynamic.BLOCK: "block",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRange:
    """What shares one scale, and the extremes where they are known beforehand."""

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
    """Find the scales of K, V, q and inputs; of those computed while it runs only what shares one.

    K, V and q have one scale, or one per head (ranks that differ give their heads different ones).
    """
    return {site: _find_range(quantizer) for site, quantizer in quantizers.items()}


def _find_range(quantizer: Quantizer) -> ScaleRange:
    scale = quantizer.scale
    if isinstance(scale, Dynamic):
        return ScaleRange(per=_PER[scale])
    return ScaleRange.of(scale, per="tensor" if scale.numel() == 1 else "head")


def per_of_weight(scale: Dynamic) -> Per:
    """Name what shares a scale of a weight: a row of it is an output channel."""
    return "channel" if scale is Dynamic.TOKEN else _PER[scale]
