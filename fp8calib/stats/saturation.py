"""How early the final amax was reached, in the data and within sequences."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import torch
from pydantic import BaseModel, ConfigDict

from fp8calib.geometry.sites import Role, Site
from fp8calib.numerics.positions import range_starts
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.statistic import SiteStats

NUM_QUARTERS = 4
"""Points of the data that the running amax is compared at, the end included."""


class Saturation(BaseModel):
    """Shares of the final amax that were reached at 1/4, 1/2 and 3/4 of the data.

    They show whether more data would still change the scales.
    """

    model_config = ConfigDict(frozen=True)
    median_share: tuple[float, ...]
    """The median over the sites, at each point."""
    least_share: tuple[float, ...]
    """The smallest share of a site, at each point."""
    slowest_site: str
    """The site with the smallest share at 1/2 of the data."""

    def describe(self) -> str:
        """Describe the shares in one line."""
        return self._describe_at("saturation: at 1/4, 1/2, 3/4 of the data")

    def describe_half(self) -> str:
        """Describe the shares at half of the data: whether more data would change the scales."""
        middle, least = self.median_share[1], self.least_share[1]
        return (
            f"half of the data gave the median site {middle:.1%} of its amax, "
            f"the slowest {least:.1%}"
        )

    def _describe_at(self, points: str) -> str:
        middle = ", ".join(f"{share:.1%}" for share in self.median_share)
        least = ", ".join(f"{share:.1%}" for share in self.least_share)
        return (
            f"{points} the median site had reached {middle} of its final amax, the slowest {least} "
            f"({self.slowest_site})"
        )


class PositionSaturation(Saturation):
    """Shares of the final amax that were reached at early positions of a sequence.

    They show whether long sequences need larger scales. `slowest_site` is the site with the
    smallest share before the first position in `below`.
    """

    below: tuple[int, ...]
    """Positions in a sequence, from 0; each share is that of the tokens before the position."""

    def describe(self) -> str:
        """Describe the shares in one line."""
        return self._describe_at(f"positions: below {', '.join(map(str, self.below))}")


def compute_saturation(stats: CalibrationStats) -> Saturation | None:
    """Compare each site's running amax with its final one; None for a shard."""
    if stats.shard is not None:
        return None
    return _compute_shares(stats, _by_quarter, NUM_QUARTERS - 1, decisive=1)


def _by_quarter(site: SiteStats) -> torch.Tensor | None:
    """Give the amax of each quarter of the sequences: [4]; 0 where there are too few."""
    if site.sequences is None or not len(site.sequences):
        return site.progress
    quarter = torch.arange(len(site.sequences)) * NUM_QUARTERS // len(site.sequences)
    return torch.zeros(NUM_QUARTERS).scatter_reduce_(0, quarter, site.sequences, "amax")


def compute_position_saturation(stats: CalibrationStats) -> PositionSaturation | None:
    """Compare the amax of early positions with the final one; None if all sequences are short."""
    reached = [site.positions for site in stats.sites.values() if site.positions is not None]
    if not reached:
        return None
    below = range_starts()[1 : int(torch.stack(reached).amax(0).count_nonzero())]
    if not below:
        return None
    shares = _compute_shares(stats, lambda site: site.positions, len(below), decisive=0)
    return None if shares is None else PositionSaturation(**dict(shares), below=tuple(below))


def _compute_shares(
    stats: CalibrationStats,
    get: Callable[[SiteStats], torch.Tensor | None],
    num_points: int,
    *,
    decisive: int,
) -> Saturation | None:
    """Compute the shares at the first points; point `decisive` determines the slowest site."""
    shares: dict[Site, list[float]] = {}
    for site, found in stats.sites.items():
        values = get(found)
        if site.role is Role.WEIGHT or values is None or not float(values.max()) > 0:
            continue
        running = values.double().cummax(0).values
        shares[site] = (running[:num_points] / running[-1]).tolist()
    if not shares:
        return None
    points = list(zip(*shares.values(), strict=True))
    return Saturation(
        median_share=tuple(median(point) for point in points),
        least_share=tuple(min(point) for point in points),
        slowest_site=str(min(shares, key=lambda site: shares[site][decisive])),
    )
