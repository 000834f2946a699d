"""Whether more data would still move the scales: how much of the final amax was seen how early."""

from __future__ import annotations

from statistics import median

from pydantic import BaseModel, ConfigDict

from fp8calib.sites import Role, Site
from fp8calib.stats import NUM_QUARTERS, CalibrationStats


class Saturation(BaseModel):
    """Shares of the final amax that were reached at 1/4, 1/2 and 3/4 of the data."""

    model_config = ConfigDict(frozen=True)
    median_share: tuple[float, ...]
    """Median over the sites."""
    least_share: tuple[float, ...]
    """The least saturated site at each point."""
    slowest_site: str
    """The site with the smallest share at 1/2 of the data."""

    def describe(self) -> str:
        """Say it in one line."""
        middle = ", ".join(f"{share:.1%}" for share in self.median_share)
        least = ", ".join(f"{share:.1%}" for share in self.least_share)
        return (
            f"saturation: at 1/4, 1/2, 3/4 of the data the median site had reached {middle} of its "
            f"final amax, the slowest {least} ({self.slowest_site})"
        )


def compute_saturation(stats: CalibrationStats) -> Saturation | None:
    """Compare each site's running amax with its final one; None when the data was not all run."""
    if stats.part is not None:
        return None
    shares = {site: found for site in stats.sites if (found := _shares(stats, site)) is not None}
    if not shares:
        return None
    points = list(zip(*shares.values(), strict=True))
    return Saturation(
        median_share=tuple(median(point) for point in points),
        least_share=tuple(min(point) for point in points),
        slowest_site=str(min(shares, key=lambda site: shares[site][1])),
    )


def _shares(stats: CalibrationStats, site: Site) -> list[float] | None:
    progress = stats.sites[site].progress
    if site.role is Role.WEIGHT or progress is None or not float(progress.max()) > 0:
        return None
    final = float(progress.max())
    return [float(progress[: point + 1].max()) / final for point in range(NUM_QUARTERS - 1)]
