"""Which magnitudes of a site a rule clips, by its amax and its histogram."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import numpy as np
import torch

from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.histogram import LOWEST_OCTAVE
from fp8calib.numerics.rules import Rule

if TYPE_CHECKING:
    from fp8calib.numerics.histogram_estimates import Spread

_CANDIDATES_PER_OCTAVE = 16
_SEARCHED_OCTAVES = 16
"""A value 2**16 times a typical one outweighs all that clipping it can save on 2**32 of those."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """How a rule changes each amax of one site: of the tensor, its heads or its channels."""

    limit: float = inf
    """Magnitudes beyond this are clipped."""
    factor: float = 1.0
    fixed: float | None = None
    """Replaces every amax above zero."""
    kept_amax: str = ""
    """Why the rule could not be applied and the amax is used; empty if it was applied."""

    def apply(self, amax: torch.Tensor) -> torch.Tensor:
        """Give the magnitudes that fmt.max represents, in the shape and dtype of `amax`."""
        if self.fixed is not None:
            return torch.where(amax > 0, self.fixed, amax)
        largest = torch.finfo(amax.dtype).max
        return (amax.clamp(max=self.limit) * self.factor).clamp(max=largest)


def find_clip_range(
    rule: Rule, *, amax: float, histogram: torch.Tensor | None, fmt: Fp8Format
) -> ClipRange:
    """Find the clip range of a site by its `amax` and its histogram (int64 [bins]).

    A limit from a histogram applies to the whole site: heads and ranks with a smaller amax keep
    theirs. Histograms are sampled: of the values they miss only the amax is known, and it counts as
    one value. `percentile:100` is the amax exactly.
    """
    if rule.kind == "1.0":
        return ClipRange(fixed=fmt.max)
    if rule.kind == "headroom":
        return ClipRange(factor=rule.number)
    if rule.kind == "amax" or rule == Rule("percentile", 100) or not amax > 0:
        return ClipRange()
    if histogram is None or not int(histogram.sum()):
        return ClipRange(kept_amax=f"{rule} needs a histogram, which is missing: amax is used")
    from fp8calib.numerics.histogram_estimates import spread_counts  # noqa: PLC0415 -- few rules

    spread = spread_counts(histogram, amax=amax)
    if rule.kind == "mse":
        limit = _least_error(spread, amax, fmt)
    else:
        limit = spread.quantile(rule.number / 100)
    if not limit:
        kind_of_values = f"values that are zero or under 2**{LOWEST_OCTAVE}"
        return ClipRange(kept_amax=f"{rule} finds only {kind_of_values}: amax is used")
    return ClipRange(limit=min(limit, amax))


def _least_error(spread: Spread, amax: float, fmt: Fp8Format) -> float:
    """Find the magnitude up to `amax` with the least squared error; the largest of equal ones.

    0.0 if only zeros were counted, for which every magnitude is right.
    """
    if not spread.counts.any():
        return 0.0
    steps = np.arange(_SEARCHED_OCTAVES * _CANDIDATES_PER_OCTAVE)
    candidates = amax * 2.0 ** (-steps / _CANDIDATES_PER_OCTAVE)
    errors = spread.squared_errors(candidates / fmt.max, fmt)
    return float(candidates[errors.argmin()])
