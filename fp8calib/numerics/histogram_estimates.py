"""Estimate from a histogram a percentile, what a scale clips, and its squared error.

A histogram counts the magnitudes in each bin, not where in the bin they are. They are assumed to be
spread evenly in log2 over the bin, so a bound inside a bin splits its count in proportion. Bin 0
counts zeros and magnitudes below 2**-40; all are assumed to be zeros.

A histogram may miss the largest magnitudes, because calibration samples the tokens it counts
(`StatsHeader.histogram_sequences`). The amax is exact: it is counted as one value.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import isfinite

import numpy as np
import torch
from numpy.typing import NDArray

from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.histogram import NUM_BINS, lower_edge

Doubles = NDArray[np.float64]
"""numpy, because torch starts threads even for a few hundred values: 280 ms instead of 5 on a busy
machine."""
_POINT = 1 + 2.0**-20
"""The ratio of the edges of a bin that stands for a single value."""
_AT_THE_EDGE = 1 + 2.0**-18
"""A bound this close below a value covers it, because scales are rounded to fp32."""


def clipped_share(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Estimate the share, 0 to 1, of all counted values for which |x| / scale exceeds fmt.max.

    Zeros count as values. `amax`, if given, is the largest of the values. The share of an empty
    histogram is 0.
    """
    spread = spread_counts(histogram, amax=amax)
    if not spread.total:
        return 0.0
    covered = spread.count_below(scale * fmt.max * _AT_THE_EDGE)
    return max(1 - covered / spread.total, 0.0)


def spread_counts(histogram: torch.Tensor, *, amax: float | None = None) -> Spread:
    """Spread the counts of a histogram, int64 [NUM_BINS], over their bins.

    If `amax` is given, one value is placed there. It is taken from the highest bin with a count if
    that bin reaches up to the amax; otherwise it is added, because sampling missed it. The last bin
    of a histogram has no upper edge; it ends at 2**24, or at a larger `amax`.
    """
    edges, counts = _bin_edges(), histogram[1:].numpy().astype(np.float64)
    if amax is not None and counts.any():
        edges, counts = _put_one_at(amax, edges, counts)
    return Spread(edges=edges, counts=counts, num_zeros=float(histogram[0]))


def _put_one_at(amax: float, edges: Doubles, counts: Doubles) -> tuple[Doubles, Doubles]:
    top = int(counts.nonzero()[0].max())
    edges, counts = edges[: top + 2].copy(), counts[: top + 1].copy()
    if amax < edges[-1] or top == NUM_BINS - 2:
        counts[-1] -= 1
        edges[-1] = max(amax, edges[-2] * _POINT)
    else:
        edges = np.append(edges, max(amax, edges[-1] * _POINT))
        counts = np.append(counts, 0.0)
    return np.append(edges, edges[-1] * _POINT), np.append(counts, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """A distribution of magnitudes: zeros, and counts spread evenly in log2 over bins.

    All float64: edges [B + 1], counts [B].
    """

    edges: Doubles
    counts: Doubles
    num_zeros: float

    @property
    def total(self) -> float:
        """The number of values, zeros included."""
        return self.num_zeros + float(self.counts.sum())

    def count_below(self, bound: float) -> float:
        """Count the values under `bound` (> 0), zeros included."""
        return self.num_zeros + float(self._moments_below(np.array([bound]))[0][0])

    def quantile(self, share: float) -> float:
        """Give the magnitude below which a share in (0, 1] of all values lies; 0.0 among zeros."""
        rank = share * self.total - self.num_zeros
        if rank <= 0:
            return 0.0
        reached = self.counts.cumsum()
        index = int(min(np.searchsorted(reached, rank), self.counts.nonzero()[0].max()))
        fraction = 1 - (reached[index] - rank) / self.counts[index]
        low, high = self.edges[index : index + 2]
        return float(low * (high / low) ** min(fraction, 1.0))

    def squared_errors(self, scales: Doubles, fmt: Fp8Format) -> Doubles:
        """Sum (x - dequantized x)**2 over all values, for each of `scales`: float64 [S].

        Exact for this distribution: the values between the midpoints around an FP8 value round to
        it, and their moments 0, 1 and 2 give the error. Values beyond fmt.max saturate. Ties have
        measure zero here.
        """
        values = _magnitudes(fmt)
        bounds = scales[:, None] * ((values[1:] + values[:-1]) / 2)
        end = np.maximum(bounds[:, -1:], self.edges[-1])
        bounds = np.concatenate([np.zeros_like(end), bounds, end], axis=1)
        count, first, second = (np.diff(moment) for moment in self._moments_below(bounds))
        rounded = scales[:, None] * values
        errors: Doubles = (second - 2 * rounded * first + rounded**2 * count).sum(axis=1)
        return errors.clip(min=0)

    def _moments_below(self, bounds: Doubles) -> tuple[Doubles, ...]:
        """Sum x**0, x**1 and x**2 over the values between zero and each bound."""
        bounds = bounds.clip(self.edges[0], self.edges[-1])
        index = np.searchsorted(self.edges[:-1], bounds, side="right") - 1
        low, high = self.edges[:-1], self.edges[1:]
        density = self.counts / np.log(high / low)
        start = low[index]
        inside = (np.log(bounds / start), bounds - start, (bounds**2 - start**2) / 2)
        whole = (self.counts, density * (high - low), density * (high**2 - low**2) / 2)
        before = (moment.cumsum() - moment for moment in whole)
        return tuple(
            earlier[index] + density[index] * part
            for earlier, part in zip(before, inside, strict=True)
        )


@cache
def _bin_edges() -> Doubles:
    """Give the edges of bins 1 and up: the first bfloat16 value of each bin."""
    edges = np.array([lower_edge(index) for index in range(1, NUM_BINS + 1)], dtype=np.float32)
    codes = (edges.view(np.uint32) + np.uint32(0xFFFF)) & np.uint32(0xFFFF0000)
    return codes.view(np.float32).astype(np.float64)


@cache
def _magnitudes(fmt: Fp8Format) -> Doubles:
    """List the finite values of a format from zero up."""
    values = [value for code in range(0x80) if isfinite(value := fmt.value_of(code))]
    return np.array(values, dtype=np.float64)
