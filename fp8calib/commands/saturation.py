"""How early the final amax was reached, in the data and within sequences."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict

from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.positions import range_starts

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import CalibrationStats

NUM_QUARTERS = 4


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
            f"after half of the text the median tensor had reached {middle:.1%} of its final amax, "
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
    import numpy as np

    if stats.shard is not None:
        return None
    by_quarter: dict[Site, Any] = {}
    for site, seen in stats.sites.items():
        by_quarter[site] = seen.progress
        if seen.sequences is not None and len(seen.sequences):  # 0 where there are too few
            quarter = np.arange(len(seen.sequences)) * NUM_QUARTERS // len(seen.sequences)
            by_quarter[site] = np.zeros(NUM_QUARTERS)
            np.maximum.at(by_quarter[site], quarter, np.asarray(seen.sequences))
    shares = _compute_shares(by_quarter, NUM_QUARTERS - 1, decisive=1)
    return None if shares is None else Saturation(**shares)


def compute_position_saturation(stats: CalibrationStats) -> PositionSaturation | None:
    """Compare the amax of early positions with the final one; None if all sequences are short."""
    import numpy as np

    positions = {site: seen.positions for site, seen in stats.sites.items()}
    reached = [np.asarray(found) for found in positions.values() if found is not None]
    if not reached:
        return None
    below = range_starts()[1 : int(np.count_nonzero(np.max(reached, axis=0)))]
    shares = _compute_shares(positions, len(below), decisive=0) if below else None
    return None if shares is None else PositionSaturation(**shares, below=tuple(below))


def _compute_shares(
    values: Mapping[Site, Any], num_points: int, *, decisive: int
) -> dict[str, Any] | None:
    """Compute the shares at the first points; point `decisive` determines the slowest site."""
    import numpy as np

    shares: dict[Site, list[float]] = {}
    for site, found in values.items():
        if site.role is not Role.WEIGHT and found is not None and float(found.max()) > 0:
            running = np.maximum.accumulate(np.asarray(found, dtype=np.float64))
            shares[site] = (running[:num_points] / running[-1]).tolist()
    if not shares:
        return None
    points = list(zip(*shares.values(), strict=True))
    return {
        "median_share": tuple(median(point) for point in points),
        "least_share": tuple(min(point) for point in points),
        "slowest_site": str(min(shares, key=lambda site: shares[site][decisive])),
    }
