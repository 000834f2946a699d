"""The running statistics of one site, on whatever device its tensors are."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from fp8calib.geometry.sites import Site
from fp8calib.stats.calibration_stats import NUM_QUARTERS, SiteStats
from fp8calib.stats.positions import NUM_RANGES


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One observation, which counts once its batch is whole."""

    site: Site
    num_tokens: int
    amax: torch.Tensor
    positions: torch.Tensor | None = None
    """Tensor-wide, of the ranges of positions that the batch reaches: [<= NUM_RANGES]."""
    histogram: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None


@dataclass(slots=True)
class SiteAccumulator:
    """The running statistics of one site."""

    count: int = 0
    amax: torch.Tensor | None = None
    is_open: bool = False
    quarter: torch.Tensor | None = None
    """Counts while a quarter is open, and is used again for the next."""
    progress: list[torch.Tensor | None] = field(default_factory=lambda: [None] * NUM_QUARTERS)
    positions: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    expert_counts: torch.Tensor | None = None
    histogram: torch.Tensor | None = None

    def observe(self, seen: Observation) -> None:
        """Count an observation of the open quarter."""
        self.count += seen.num_tokens
        if self.is_open or self.quarter is None:
            self.quarter = _larger(self.quarter, seen.amax)
        else:
            self.quarter.copy_(seen.amax)
        self.is_open = True
        if seen.positions is not None:
            if self.positions is None:
                self.positions = seen.positions.new_zeros(NUM_RANGES)
            _larger(self.positions[: len(seen.positions)], seen.positions)
        if seen.histogram is not None:
            self.histogram = _sum(self.histogram, seen.histogram)
        if seen.experts is not None:
            self.experts = _larger(self.experts, seen.experts)
        if seen.expert_counts is not None:
            self.expert_counts = _sum(self.expert_counts, seen.expert_counts)

    def close_quarter(self, quarter: int) -> None:
        """Add the open quarter to what was seen; it may be opened again."""
        if self.quarter is None or not self.is_open:
            return
        self.progress[quarter] = _larger(self.progress[quarter], self.quarter.max())
        self.amax = _larger(self.amax, self.quarter)
        self.is_open = False


def freeze(running: SiteAccumulator) -> SiteStats:
    """Give what was seen, on the CPU; no quarter may be open."""
    progress = torch.zeros(NUM_QUARTERS)
    for quarter, amax in enumerate(running.progress):
        if amax is not None:
            progress[quarter] = amax.cpu()
    amax = running.amax if running.amax is not None else torch.zeros(0)
    return SiteStats(
        count=running.count,
        amax=amax.cpu(),
        experts=_to_cpu(running.experts),
        expert_counts=_to_cpu(running.expert_counts),
        progress=progress,
        positions=_to_cpu(running.positions),
        histogram=_to_cpu(running.histogram),
    )


def _to_cpu(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.cpu()


def _larger(running: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    if running is None:
        return new.clone()
    return torch.maximum(running, new.to(running.device), out=running)


def _sum(running: torch.Tensor | None, new: torch.Tensor) -> torch.Tensor:
    return new.clone() if running is None else running.add_(new.to(running.device))
