"""The statistics of a site.

Every statistic is an exact reduction: a maximum or an integer sum. Whatever the order and grouping
in which parts of the data are observed and joined, the result is therefore the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fp8calib.model.shapes import Site
from fp8calib.numerics.positions import NUM_RANGES

NAMES = (
    *("amax", "amax_in", "experts", "expert_counts"),
    *("progress", "positions", "histogram", "sequences"),
)
"""In the order that stats files store them; the tensor of one is `<site>/<name>` there."""
COUNTS = frozenset({"expert_counts", "histogram"})
"""int64 counts, which are added; all others are fp32 magnitudes, whose maximum is kept."""
LENGTHS = {"positions": NUM_RANGES}
"""The number of elements, where a batch may give only the first of them."""


def join(name: str, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Join a statistic of two parts of the data."""
    return one + other if name in COUNTS else torch.maximum(one, other)


def is_valid(name: str, stored: torch.Tensor) -> bool:
    """Whether a tensor holds values that a statistic can have, and as many as it has."""
    return (
        (name not in LENGTHS or stored.shape == (LENGTHS[name],))
        and stored.dtype is (torch.int64 if name in COUNTS else torch.float32)
        and bool((stored.isfinite() & (stored >= 0)).all())
    )


@dataclass(frozen=True, slots=True, init=False)
class SiteStats:
    """The statistics of one site; those that other packages use are properties."""

    count: int
    """The number of tokens that were observed; 0 for weights."""
    tensors: Mapping[str, torch.Tensor]
    """By the name of their statistic, in the order of `NAMES`."""

    def __init__(
        self,
        *,
        count: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **named: torch.Tensor | None,
    ) -> None:
        """Take the tensors in a mapping, by name, or both."""
        given = {name: x for name, x in ({**(tensors or {}), **named}).items() if x is not None}
        if unknown := given.keys() - set(NAMES):
            raise ValueError(f"unknown statistic {min(unknown)}")
        object.__setattr__(self, "count", count)
        object.__setattr__(self, "tensors", {name: given[name] for name in NAMES if name in given})

    @property
    def amax(self) -> torch.Tensor:
        """Inputs: per input channel; k, v, q: per head; weights: per output channel: [C]."""
        return self.tensors["amax"]

    @property
    def amax_in(self) -> torch.Tensor | None:
        """Weights: per input channel: [I]."""
        return self.tensors.get("amax_in")

    @property
    def experts(self) -> torch.Tensor | None:
        """Experts: per expert and block of channels on the axis that ranks split: [E, B]."""
        return self.tensors.get("experts")

    @property
    def expert_counts(self) -> torch.Tensor | None:
        """Experts: tokens routed to each: [E]."""
        return self.tensors.get("expert_counts")

    @property
    def progress(self) -> torch.Tensor | None:
        """Tensor-wide amax inside each quarter of the data: [4]; in files of version 1."""
        return self.tensors.get("progress")

    @property
    def positions(self) -> torch.Tensor | None:
        """Tensor-wide amax of the tokens in each range of positions: [NUM_RANGES].

        0 in ranges that no sequence reached; None where the positions of rows are not known.
        """
        return self.tensors.get("positions")

    @property
    def sequences(self) -> torch.Tensor | None:
        """Tensor-wide amax of each sequence of the run: [sequences].

        None where the sequences of rows are not known, and in files of version 1.
        """
        return self.tensors.get("sequences")

    @property
    def histogram(self) -> torch.Tensor | None:
        """Counts of log2 magnitudes of the sampled tokens: [NUM_BINS]."""
        return self.tensors.get("histogram")


def merge_sites(parts: Iterable[Mapping[Site, SiteStats]]) -> dict[Site, SiteStats]:
    """Join the statistics of each site over several parts of the data."""
    merged: dict[Site, SiteStats] = {}
    for part in parts:
        for site, other in part.items():
            one = merged.get(site)
            merged[site] = other if one is None else _join(one, other)
    return merged


def _join(one: SiteStats, other: SiteStats) -> SiteStats:
    tensors = {**one.tensors, **other.tensors}
    for name in one.tensors.keys() & other.tensors.keys():
        tensors[name] = join(name, one.tensors[name], other.tensors[name])
    return SiteStats(count=one.count + other.count, tensors=tensors)


def name_tensors(sites: Mapping[Site, SiteStats]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name the tensors of sites as stats files do: `<site>/<name>`."""
    for site, stats in sites.items():
        for name, tensor in stats.tensors.items():
            yield f"{site}/{name}", tensor


def group_tensors(named: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Group the tensors of `name_tensors` by their site."""
    by_site: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in named.items():
        site, _, name = key.rpartition("/")
        by_site.setdefault(site, {})[name] = tensor
    return by_site
