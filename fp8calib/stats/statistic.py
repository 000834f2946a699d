"""The statistics of a site, each declared once.

Every statistic is an exact reduction: a maximum or an integer sum. Whatever the order and grouping
in which parts of the data are observed and joined, the result is therefore the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from fp8calib.geometry.model_geometry import Linear, ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.numerics.positions import NUM_RANGES

NUM_QUARTERS = 4
"""Of the data, in files of version 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """How one statistic of a site is joined, stored and sized."""

    name: str
    """Its tensor is `<site>/<name>` in a stats file."""
    is_count: bool = False
    """int64 counts, which are added; otherwise fp32 magnitudes, whose maximum is kept."""
    length: int | None = None
    """The number of elements, if a batch may give only the first of them."""
    num_elements: Callable[[Linear, Role], int] | None = None
    """Gives the number of elements for a linear's input or weight, for the memory plan of a run.
    None: so few that the plan's reserve covers them."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the stored tensor."""
        return torch.int64 if self.is_count else torch.float32

    def start(self, new: torch.Tensor) -> torch.Tensor:
        """Make the running tensor for tensors like `new`, on its device: zeros."""
        return torch.zeros_like(new) if self.length is None else new.new_zeros(self.length)

    def join(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        """Join the stored tensors of two parts of the data."""
        return one + other if self.is_count else torch.maximum(one, other)

    def is_valid(self, stored: torch.Tensor) -> bool:
        """Whether a tensor holds values that this statistic can have, and as many as it has."""
        is_sized = self.length is None or stored.shape == (self.length,)
        return (
            is_sized
            and stored.dtype is self.dtype
            and bool((stored.isfinite() & (stored >= 0)).all())
        )


def _amax_elements(linear: Linear, role: Role) -> int:
    return linear.out_features if role is Role.WEIGHT else linear.in_features


STATISTICS = {
    statistic.name: statistic
    for statistic in (
        Statistic(name="amax", num_elements=_amax_elements),
        Statistic(
            name="amax_in",
            num_elements=lambda linear, role: linear.in_features if role is Role.WEIGHT else 0,
        ),
        Statistic(name="experts"),
        Statistic(name="expert_counts", is_count=True),
        Statistic(name="progress"),
        Statistic(name="positions", length=NUM_RANGES),
        Statistic(name="histogram", is_count=True),
        Statistic(name="sequences"),
    )
}
"""By name, in the order that stats files store them."""


def stats_bytes(geometry: ModelGeometry, *, inputs: bool, weights: bool) -> int:
    """Compute the memory that the statistics of linears take."""
    roles = [Role.INPUT] * inputs + [Role.WEIGHT] * weights
    return sum(
        statistic.num_elements(linear, role) * statistic.dtype.itemsize
        for statistic in STATISTICS.values()
        if statistic.num_elements is not None
        for _, linear in geometry.linears()
        for role in roles
    )


@dataclass(frozen=True, slots=True, init=False)
class SiteStats:
    """The statistics of one site; those that other packages use are properties."""

    count: int
    """The number of tokens that were observed; 0 for weights."""
    tensors: Mapping[str, torch.Tensor]
    """By the name of their statistic, in the order of `STATISTICS`."""

    def __init__(
        self,
        *,
        count: int,
        tensors: Mapping[str, torch.Tensor] | None = None,
        **named: torch.Tensor | None,
    ) -> None:
        """Take the tensors in a mapping, by name, or both."""
        given = {name: x for name, x in ({**(tensors or {}), **named}).items() if x is not None}
        if unknown := given.keys() - STATISTICS.keys():
            raise ValueError(f"unknown statistic {min(unknown)}")
        object.__setattr__(self, "count", count)
        object.__setattr__(
            self, "tensors", {name: given[name] for name in STATISTICS if name in given}
        )

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
