"""How much of the final amax was seen how early: in the data, and in each sequence."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import TypedDict

import torch
from pydantic import BaseModel, ConfigDict

from fp8calib.geometry.sites import Role, Site
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.positions import range_starts
from fp8calib.stats.statistic import NUM_QUARTERS, SiteStats


class _Reached(BaseModel):
    """Shares of the final amax that were reached at some points."""

    model_config = ConfigDict(frozen=True)
    median_share: tuple[float, ...]
    """Median over the sites."""
    least_share: tuple[float, ...]
    """The least saturated site at each point."""
    slowest_site: str
    """The site that `least_share` speaks of at the point that tells most."""

    def _describe(self, points: str) -> str:
        middle = ", ".join(f"{share:.1%}" for share in self.median_share)
        least = ", ".join(f"{share:.1%}" for share in self.least_share)
        return (
            f"{points} the median site had reached {middle} of its final amax, the slowest {least} "
            f"({self.slowest_site})"
        )


class Saturation(_Reached):
    """Whether more data would still move the scales: shares at 1/4, 1/2 and 3/4 of the data.

    `slowest_site` is the one with the smallest share at 1/2 of the data.
    """

    def describe(self) -> str:
        """Say it in one line."""
        return self._describe("saturation: at 1/4, 1/2, 3/4 of the data")


class PositionSaturation(_Reached):
    """Whether long sequences need larger scales: shares of the tokens at the positions below.

    `slowest_site` is the one with the smallest share below the first of `below`.
    """

    below: tuple[int, ...]
    """Positions inside a sequence, from 0; the tokens before each are meant."""

    def describe(self) -> str:
        """Say it in one line."""
        return self._describe(f"positions: below {', '.join(map(str, self.below))}")


class _Shares(TypedDict):
    median_share: tuple[float, ...]
    least_share: tuple[float, ...]
    slowest_site: str


def compute_saturation(stats: CalibrationStats) -> Saturation | None:
    """Compare each site's running amax with its final one; None when the data was not all run."""
    if stats.shard is not None:
        return None
    shares = _compute_shares(stats, lambda site: site.progress, NUM_QUARTERS - 1, telling=1)
    return None if shares is None else Saturation(**shares)


def compute_position_saturation(stats: CalibrationStats) -> PositionSaturation | None:
    """Compare the amax of a sequence's first tokens with that of all; None if all were short."""
    reached = [site.positions for site in stats.sites.values() if site.positions is not None]
    if not reached:
        return None
    below = range_starts()[1 : int(torch.stack(reached).amax(0).count_nonzero())]
    if not below:
        return None
    shares = _compute_shares(stats, lambda site: site.positions, len(below), telling=0)
    return None if shares is None else PositionSaturation(**shares, below=tuple(below))


def _compute_shares(
    stats: CalibrationStats,
    get: Callable[[SiteStats], torch.Tensor | None],
    num_points: int,
    *,
    telling: int,
) -> _Shares | None:
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
    return {
        "median_share": tuple(median(point) for point in points),
        "least_share": tuple(min(point) for point in points),
        "slowest_site": str(min(shares, key=lambda site: shares[site][telling])),
    }
