"""Which modality sets the amax of a site, and what the text alone would give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fp8calib.data.media import MODALITIES, Modality
from fp8calib.geometry.sites import Role, Site
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.statistic import SiteStats

_OF_ALL_TOKENS = frozenset({"histogram", "positions", "progress"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SetBy:
    """The modality with the largest amax at a site, which then sets a scale of the tensor."""

    site: Site
    modality: Modality
    amax: float
    ratio: float
    """The amax over that of text; infinite where the text has none."""


def find_setters(stats: CalibrationStats) -> Iterator[SetBy]:
    """Find the modality that sets the amax of each site that saw several."""
    for site, found in stats.sites.items():
        if found.modalities is None or site.role is Role.WEIGHT:
            continue
        largest = int(found.modalities.argmax())
        amax, text = float(found.modalities[largest]), float(found.modalities[0])
        ratio = amax / text if text else float("inf")
        yield SetBy(site=site, modality=MODALITIES[largest], amax=amax, ratio=ratio)


def keep_text(stats: CalibrationStats) -> CalibrationStats | None:
    """Give the statistics that the text of the rows alone has; None in a run of text.

    Only the amax is known of text alone: other statistics are left out, and those of single experts
    are of all tokens. A site whose tokens are not known keeps its amax.
    """
    if all(found.text is None for found in stats.sites.values()):
        return None
    sites = {site: _keep_text(found) for site, found in stats.sites.items()}
    return replace(stats, sites=sites)


def _keep_text(found: SiteStats) -> SiteStats:
    if found.text is None:
        return found
    kept = {name: x for name, x in found.tensors.items() if name not in _OF_ALL_TOKENS}
    return SiteStats(count=found.count, tensors={**kept, "amax": found.text})
