"""How early a calibration reached its amax, and what it did not measure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import TYPE_CHECKING

from fp8calib.calibration.stats_header import StatsHeader
from fp8calib.errors import cut_list
from fp8calib.model.geometry import KV_ROLES, Frozen, Role, Site

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats

NUM_QUARTERS = 4
_KV_SITES = tuple(f".{role}" for role in KV_ROLES)


class Saturation(Frozen):
    """Shares of the final amax that were reached at 1/4, 1/2 and 3/4 of the data.

    They show whether more data would still change the scales: those of K and V, or of inputs where
    neither was observed.
    """

    median_share: tuple[float, ...]
    """The median over the sites, at each point."""
    least_share: tuple[float, ...]
    """The smallest share of a site, at each point."""
    slowest_site: str
    """The site with the smallest share at 1/2 of the data."""

    def describe(self) -> str:
        """Describe the shares at half of the data in one line."""
        median, least = (int(100 * share[1]) for share in (self.median_share, self.least_share))
        counted = "K and V" if self.slowest_site.endswith(_KV_SITES) else "inputs"
        return (
            f"half of the text gave {median}% of the final amax of {counted} in the median, and "
            f"{least}% in the slowest tensor ({self.slowest_site})"
        )


def compute_saturation(stats: RunStats) -> Saturation | None:
    """Compare the running amax of K and V, or of inputs, with the final one; None for a shard."""
    import numpy as np

    shares: dict[Site, list[float]] = {}
    for site, seen in stats.sites.items() if stats.shard is None else ():
        amax = None if seen.progress is None else np.asarray(seen.progress, dtype=np.float64)
        if seen.sequences is not None and len(seen.sequences):  # 0 where there are too few
            quarter = np.arange(len(seen.sequences)) * NUM_QUARTERS // len(seen.sequences)
            amax = np.zeros(NUM_QUARTERS)
            np.maximum.at(amax, quarter, np.asarray(seen.sequences))
        if site.role is not Role.WEIGHT and amax is not None and amax.max() > 0:
            running = np.maximum.accumulate(amax)
            shares[site] = (running[:-1] / running[-1]).tolist()
    if not shares:
        return None
    shares = {site: each for site, each in shares.items() if site.role in KV_ROLES} or shares
    points = list(zip(*shares.values(), strict=True))
    return Saturation(
        median_share=tuple(map(median, points)),
        least_share=tuple(map(min, points)),
        slowest_site=str(min(shares, key=lambda site: shares[site][1])),
    )


def describe_skipped(header: StatsHeader) -> Iterator[str]:
    """Describe what was not observed in one line for each reason."""
    reasons: dict[str, list[str]] = {}
    for item in header.skipped:
        reasons.setdefault(item.why, []).append(str(item.site))
    for why, sites in reasons.items():
        yield f"not measured: {cut_list(sites, 3)} ({why})"
