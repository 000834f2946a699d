"""What a histogram tells about a scale: what clips, what vanishes, the error to expect.

A histogram knows how many magnitudes lie in a bin, not where in it. They are taken to be spread
evenly in log2 over their bin, so a bound that cuts a bin splits its count in proportion. Bin 0
mixes zeros with magnitudes under 2**-40; it is taken to hold zeros.

Calibration samples its histograms (`StatsHeader.histogram_sequences`), so the largest magnitude of
all may be missing from one: a share of 0 says that nothing sampled was concerned.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import inf, isfinite, log10

import torch

from fp8calib.fp8 import Fp8Format
from fp8calib.histogram import NUM_BINS, lower_edge

_NARROWEST_BIN = 2.0**-20
"""A top bin that is cut off at its lower edge keeps this relative width, and a logarithm of it."""


def clipped_share(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Estimate the share, 0 to 1, of all counted values for which |x| / scale exceeds fmt.max.

    `amax`, where it is known, ends the highest bin that holds anything. Zeros count as values; a
    histogram of nothing clips nothing.
    """
    spread = spread_counts(histogram, amax=amax)
    if not spread.total:
        return 0.0
    return 1 - spread.count_below(scale * fmt.max) / spread.total


def flushed_share(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Estimate the share, 0 to 1, of non-zero values that round to zero.

    These are the values with |x| / scale under half of the smallest subnormal. Bin 0 is left out of
    both sides of the share: which of its values are zeros is not known, and where they are not, the
    true share is larger. A histogram without any other values flushes nothing.
    """
    spread = spread_counts(histogram, amax=amax)
    num_nonzero = spread.total - spread.num_zeros
    if not num_nonzero:
        return 0.0
    flushed = spread.count_below(scale * fmt.smallest_subnormal / 2) - spread.num_zeros
    return flushed / num_nonzero


def expected_sqnr_db(
    histogram: torch.Tensor, scale: float, fmt: Fp8Format, *, amax: float | None = None
) -> float:
    """Estimate the signal-to-quantization-noise ratio in dB; inf where there is no noise.

    Values are divided by `scale`, saturated and rounded to nearest.
    """
    spread = spread_counts(histogram, amax=amax)
    noise = float(spread.squared_errors(torch.tensor([scale], dtype=torch.float64), fmt))
    return 10 * log10(spread.sum_of_squares / noise) if noise else inf


def spread_counts(histogram: torch.Tensor, *, amax: float | None = None) -> Spread:
    """Spread the counts of a histogram, int64 [NUM_BINS], over their bins.

    The highest bin that holds anything ends at `amax`, where it is given; the last bin of all,
    which has no upper edge, at 2**24 or at a larger `amax`.
    """
    edges = _bin_edges().clone()
    counts = histogram[1:].to(torch.float64)
    if amax is not None and bool(counts.any()):
        top = int(counts.nonzero().max())
        highest = max(amax, float(edges[top]) * (1 + _NARROWEST_BIN))
        edges[top + 1] = highest if top == len(counts) - 1 else min(highest, float(edges[top + 1]))
    return Spread(edges=edges, counts=counts, num_zeros=float(histogram[0]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Magnitudes whose distribution is known: as many zeros, and counts even in log2 over bins.

    Everything is float64; edges are [B + 1], counts [B].
    """

    edges: torch.Tensor
    counts: torch.Tensor
    num_zeros: float

    @property
    def total(self) -> float:
        """How many values there are, zeros included."""
        return self.num_zeros + float(self.counts.sum())

    @property
    def sum_of_squares(self) -> float:
        """The second moment: the power of the signal, not divided by the count."""
        return float(self._moments_below(self.edges[-1:])[2])

    def count_below(self, bound: float) -> float:
        """Count the values under `bound` (> 0), zeros included."""
        bounds = torch.tensor([bound], dtype=torch.float64)
        return self.num_zeros + float(self._moments_below(bounds)[0])

    def quantile(self, share: float) -> float:
        """Give the magnitude below which a share in (0, 1] of all values lies; 0.0 among zeros."""
        rank = share * self.total - self.num_zeros
        if rank <= 0:
            return 0.0
        reached = self.counts.cumsum(0)
        index = min(int(torch.searchsorted(reached, rank)), int(self.counts.nonzero().max()))
        fraction = 1 - (float(reached[index]) - rank) / float(self.counts[index])
        low, high = self.edges[index : index + 2].tolist()
        return float(low * (high / low) ** min(fraction, 1.0))

    def squared_errors(self, scales: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
        """Sum (x - dequantized x)**2 over all values, for each of `scales`: float64 [S].

        Exact for this distribution: every FP8 value q takes what lies between the midpoints to its
        neighbours, and of that interval the moments 0, 1 and 2 are enough. Beyond fmt.max all
        saturates. A tie between two FP8 values is a point of no weight here.
        """
        values = _magnitudes(fmt)
        bounds = scales[:, None] * ((values[1:] + values[:-1]) / 2)
        end = bounds[:, -1:].maximum(self.edges[-1])
        bounds = torch.cat([torch.zeros_like(end), bounds, end], dim=1)
        count, first, second = (moment.diff(dim=1) for moment in self._moments_below(bounds))
        rounded = scales[:, None] * values
        return (second - 2 * rounded * first + rounded**2 * count).sum(1).clamp(min=0)

    def _moments_below(self, bounds: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Sum x**0, x**1 and x**2 over the values between zero and each bound."""
        bounds = bounds.clamp(float(self.edges[0]), float(self.edges[-1]))
        index = torch.searchsorted(self.edges, bounds, right=True).sub_(1)
        index.clamp_(max=len(self.counts) - 1)
        low, high = self.edges[:-1], self.edges[1:]
        density = self.counts / (high / low).log()
        start = low[index]
        inside = ((bounds / start).log(), bounds - start, (bounds**2 - start**2) / 2)
        whole = (self.counts, density * (high - low), density * (high**2 - low**2) / 2)
        before = (moment.cumsum(0) - moment for moment in whole)
        return tuple(
            earlier[index] + density[index] * part
            for earlier, part in zip(before, inside, strict=True)
        )


@cache
def _bin_edges() -> torch.Tensor:
    """Give the edges of bins 1 and up, float64: the first bfloat16 value each bin takes."""
    edges = torch.tensor([lower_edge(index) for index in range(1, NUM_BINS + 1)])
    codes = (edges.view(torch.int32) + 0xFFFF) >> 16 << 16
    return codes.view(torch.float32).to(torch.float64)


@cache
def _magnitudes(fmt: Fp8Format) -> torch.Tensor:
    """List the finite values of a format from zero up, float64."""
    values = [value for code in range(0x80) if isfinite(value := fmt.value_of(code))]
    return torch.tensor(values, dtype=torch.float64)
