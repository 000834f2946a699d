"""Histograms of magnitudes, with the range of the format, one site at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8calib.verification.html.plots import (
    BLUE,
    INK,
    RED,
    Json,
    PageSection,
    Plot,
    View,
    log_axis,
    make_layout,
    title,
)
from fp8calib.verification.report import HistogramResult

_BIN_OCTAVES = 1 / 8
_MARGIN_OCTAVES = 1.0


def histograms_section(histograms: Sequence[HistogramResult]) -> PageSection:
    """Make one plot with a view for each site that calibration observed."""
    views = [_draw(row) for row in sorted(histograms, key=_by_kind) if any(row.counts)]
    plot = Plot(name="histogram", title="Site", views=views, height=380, is_wide=True)
    return PageSection(
        title="Magnitudes and the range of the format",
        lead="All values that calibration observed at one site, on logarithmic axes. The white "
        "band is the range of FP8 at this scale: above it values clip, below it they become zero.",
        plots=[plot] if views else [],
    )


def _by_kind(row: HistogramResult) -> tuple[str, int]:
    """Sort by role and module, then by layer, so that stepping goes through the layers."""
    before, _, after = row.site.partition(f".{row.layer}.")
    return (after or before, row.layer)


def _draw(row: HistogramResult) -> View:
    total = sum(row.counts)
    pairs = zip(row.lower_edges_log2, row.counts, strict=True)
    bins = [(edge, count) for edge, count in pairs if count and math.isfinite(edge)]
    bars: Json = {
        "type": "bar",
        "name": "",
        "x": [round(edge + _BIN_OCTAVES / 2, 4) for edge, _ in bins],
        "y": [count / total for _, count in bins],
        "width": _BIN_OCTAVES,
        "marker": {"color": BLUE, "line": {"width": 0}},
        "hovertemplate": "2<sup>%{x:.2f}</sup>: %{y:.2~%} of values<extra></extra>",
    }
    edges = [*(edge for edge, _ in bins), math.log2(row.smallest), math.log2(row.largest)]
    ends = [min(edges) - _MARGIN_OCTAVES, max(edges) + _MARGIN_OCTAVES]
    return View(label=row.site, data=[bars], layout=_layout(row, bars, ends))


def _layout(row: HistogramResult, bars: Json, ends: Sequence[float]) -> Json:
    smallest, largest = math.log2(row.smallest), math.log2(row.largest)
    x = {"title": title("log2 |x|"), "range": ends, "showgrid": False}
    y = log_axis("share of values", bars["y"])
    return make_layout(
        x=x,
        y=y,
        margin={"l": 64, "r": 16, "t": 44, "b": 48},
        bargap=0,
        shapes=[
            *_shade_outside(ends[0], smallest, smallest),
            *_shade_outside(largest, ends[1], largest),
        ],
        annotations=[
            _make_note(smallest, "left", f"zero below {row.smallest:.4g}", lines_up=0),
            _make_note(largest, "right", f"clips above {row.largest:.4g}", lines_up=1),
        ],
    )


def _shade_outside(start: float, end: float, border: float) -> Sequence[Json]:
    """Shade values outside the range of the format, and draw the border."""
    upright = {"xref": "x", "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shade = {"type": "rect", "x0": start, "x1": end, "fillcolor": "#f3e3da", "line": {"width": 0}}
    stroke = {"color": RED, "width": 1.5, "dash": "dash"}
    border_line = {"type": "line", "x0": border, "x1": border, "line": stroke}
    return [{**upright, **shade}, {**upright, **border_line, "layer": "above"}]


def _make_note(x: float, side: str, text: str, *, lines_up: int) -> Json:
    place = {"x": x, "xanchor": side, "y": 1, "yref": "paper", "yanchor": "bottom"}
    words = {"text": text, "showarrow": False, "font": {"size": 12, "color": INK}}
    return {**place, **words, "yshift": 16 * lines_up}
