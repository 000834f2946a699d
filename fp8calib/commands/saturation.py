"""How early the final amax was reached, in the data and within sequences."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any, TypeVar

from fp8calib.commands.result import Record
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.positions import range_starts

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import CalibrationStats

NUM_QUARTERS = 4


class Saturation(Record):
    """Shares of the final amax that were reached at 1/4, 1/2 and 3/4 of the data.

    They show whether more data would still change the scales.
    """

    median_share: tuple[float, ...]
    """The median over the sites, at each point."""
    least_share: tuple[float, ...]
    """The smallest share of a site, at each point."""
    slowest_site: str
    """The site with the smallest share at 1/2 of the data."""

    def name_points(self) -> str:
        """Name the points."""
        return "saturation: at 1/4, 1/2, 3/4 of the data"

    def describe(self) -> str:
        """Describe the shares in one line."""
        middle, least = (
            ", ".join(f"{share:.1%}" for share in shares)
            for shares in (self.median_share, self.least_share)
        )
        return (
            f"{self.name_points()} the median tensor had reached {middle} of its final amax, the "
            f"slowest {least} ({self.slowest_site})"
        )


class PositionSaturation(Saturation):
    """Shares of the final amax that were reached at early positions of a sequence.

    They show whether long sequences need larger scales. `slowest_site` is the site with the
    smallest share before the first position in `below`.
    """

    below: tuple[int, ...]
    """Positions in a sequence, from 0; each share is that of the tokens before the position."""

    def name_points(self) -> str:
        """Name the points."""
        return f"positions: below {', '.join(map(str, self.below))}"


KindT = TypeVar("KindT", bound=Saturation)


def compute_saturation(stats: CalibrationStats) -> Saturation | None:
    """Compare each site's running amax with its final one; None for a shard."""
    import numpy as np

    if stats.shard is not None:
        return None
    quarters: dict[Site, Any] = {}
    for site, seen in stats.sites.items():
        quarters[site] = seen.progress
        if seen.sequences is not None and len(seen.sequences):  # 0 where there are too few
            quarter = np.arange(len(seen.sequences)) * NUM_QUARTERS // len(seen.sequences)
            quarters[site] = np.zeros(NUM_QUARTERS)
            np.maximum.at(quarters[site], quarter, np.asarray(seen.sequences))
    return _compute(Saturation, quarters, NUM_QUARTERS - 1, decisive=1)


def compute_position_saturation(stats: CalibrationStats) -> PositionSaturation | None:
    """Compare the amax of early positions with the final one; None if all sequences are short."""
    import numpy as np

    positions = {site: seen.positions for site, seen in stats.sites.items()}
    reached = [np.asarray(found) for found in positions.values() if found is not None]
    num_reached = int(np.count_nonzero(np.max(reached, axis=0))) if reached else 0
    below = tuple(range_starts()[1:num_reached])
    if not below:
        return None
    return _compute(PositionSaturation, positions, len(below), decisive=0, below=below)


def _compute(
    kind: type[KindT], values: Mapping[Site, Any], num_points: int, *, decisive: int, **more: Any
) -> KindT | None:
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
    return kind(
        median_share=tuple(map(median, points)),
        least_share=tuple(map(min, points)),
        slowest_site=str(min(shares, key=lambda site: shares[site][decisive])),
        **more,
    )
