"""Histograms of magnitudes against the range of the format, one chart for each site."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fp8calib.render.page.charts import BIN_OCTAVES, Axis, histogram, log_axis
from fp8calib.render.page.sections import Figure, PageSection
from fp8calib.verification.report import HistogramResult

_LOW, _HIGH = -16.0, 14.0
"""The range of log2(|x| / scale) that every histogram shows; e4m3 covers -10 to 8.8 of it."""
_MOST_DRAWN = 120


def index_histograms(histograms: Sequence[HistogramResult], worst: Sequence[str]) -> dict[str, str]:
    """Give the sites whose histograms are drawn, each with its id on the page.

    `worst` are the sites of the table of worst sites, whose histograms come first.
    """
    filled = [row for row in histograms if any(row.counts)]
    first = [row.site for site in worst for row in filled if row.site == site]
    others = [row.site for row in sorted(filled, key=_by_kind)]
    sites = list(dict.fromkeys([*first, *others]))[:_MOST_DRAWN]
    return {site: f"histogram-{index}" for index, site in enumerate(sites)}


def histograms_section(
    histograms: Sequence[HistogramResult], anchors: Mapping[str, str]
) -> PageSection:
    """Draw the histograms of the sites in `anchors`, in that order."""
    by_site = {row.site: row for row in histograms}
    figures = [_draw(by_site[site], anchor) for site, anchor in anchors.items()]
    missing = sum(any(row.counts) for row in histograms) - len(figures)
    return PageSection(
        title="Magnitudes and the range of the format",
        lead="All values that calibration observed at one site, divided by its scale. In the "
        "shaded ranges FP8 has no values: on the left they become zero, on the right they clip.",
        figures=figures,
        findings=[f"{missing} more sites are not drawn."] if missing > 0 else [],
    )


def _by_kind(row: HistogramResult) -> tuple[str, int]:
    """Sort by role and module, then by layer."""
    before, _, after = row.site.partition(f".{row.layer}.")
    return (after or before, row.layer)


def _draw(row: HistogramResult, anchor: str) -> Figure:
    shift = math.log2(row.scale)
    title = f"log2(|x| / scale); zero below {row.smallest:.2g}, clips above {row.largest:.4g}"
    ticks = [(float(value), str(value)) for value in range(-16, 15, 4)]
    chart = histogram(
        row.site,
        _list_bins(row, shift),
        x=Axis(title=title, low=_LOW, high=_HIGH, ticks=ticks),
        y=log_axis("share of values", [], low=-7, high=0, as_percent=True),
        inside=(math.log2(row.smallest) - shift, math.log2(row.largest) - shift),
    )
    return Figure(title=row.site, chart=chart, anchor=anchor)


def _list_bins(row: HistogramResult, shift: float) -> list[tuple[float, float]]:
    """List lower edges, in octaves of the scale, and shares; the ends hold what is beyond them."""
    total = sum(row.counts)
    bins: dict[float, int] = {}
    for edge, count in zip(row.lower_edges_log2, row.counts, strict=True):
        at = min(max(edge - shift, _LOW), _HIGH - BIN_OCTAVES)
        bins[at] = bins.get(at, 0) + count
    return [(at, count / total) for at, count in bins.items()]
