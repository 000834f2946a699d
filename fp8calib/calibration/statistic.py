"""The statistics of a site.

Every statistic is an exact reduction: a maximum or an integer sum. Whatever the order and grouping
in which parts of the data are observed and joined, the result is therefore the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from fp8calib.model.shapes import Site
from fp8calib.numerics.positions import NUM_RANGES

if TYPE_CHECKING:  # `show` needs none of it
    import torch

COUNTS = frozenset({"expert_counts", "histogram"})
"""int64 counts, which are added; all others are fp32 magnitudes, whose maximum is kept."""
LENGTHS = {"positions": NUM_RANGES}
"""The number of elements, where a batch may give only the first of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteStats:
    """The statistics of one site. Its fields are in the order of stats files."""

    count: int
    """The number of tokens that were observed; 0 for weights."""
    amax: torch.Tensor
    """Inputs: per input channel; k, v, q: per head; weights: per output channel: [C]."""
    amax_in: torch.Tensor | None = None
    """Weights: per input channel: [I]."""
    experts: torch.Tensor | None = None
    """Experts: per expert and block of channels on the axis that ranks split: [E, B]."""
    expert_counts: torch.Tensor | None = None
    """Experts: tokens routed to each: [E]."""
    progress: torch.Tensor | None = None
    """Tensor-wide amax inside each quarter of the data: [4]; in files of version 1."""
    positions: torch.Tensor | None = None
    """Tensor-wide amax of the tokens in each range of positions: [NUM_RANGES].

    0 in ranges that no sequence reached; None where the positions of rows are not known.
    """
    histogram: torch.Tensor | None = None
    """Counts of log2 magnitudes of the sampled tokens: [NUM_BINS]."""
    sequences: torch.Tensor | None = None
    """Tensor-wide amax of each sequence of the run: [num_sequences].

    0 in sequences that were not observed; None where the sequences of rows are not known.
    """

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that the site has, by the name of their statistic."""
        named = {name: getattr(self, name) for name in NAMES}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


NAMES = tuple(field.name for field in fields(SiteStats) if field.name != "count")
"""The tensor of one is `<site>/<name>` in stats files."""


def join(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Join a statistic of two parts of the data: counts are added, of others the larger is kept."""
    return one + other if name in COUNTS else one.maximum(other)


def merge_sites(parts: Iterable[Mapping[Site, SiteStats]]) -> dict[Site, SiteStats]:
    """Join the statistics of each site over several parts of the data."""
    merged: dict[Site, SiteStats] = {}
    for part in parts:
        for site, new in part.items():
            if (old := merged.get(site)) is None:
                merged[site] = new
                continue
            tensors = old.tensors
            for name, x in new.tensors.items():
                tensors[name] = join(name, tensors[name], x) if name in tensors else x
            merged[site] = SiteStats(count=old.count + new.count, **tensors)
    return merged


def name_tensors(sites: Mapping[Site, SiteStats]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name the tensors of sites as stats files do: `<site>/<name>`."""
    for site, stats in sites.items():
        for name, tensor in stats.tensors.items():
            yield f"{site}/{name}", tensor
