"""The plots of the page and their common style, as plain data for plotly.js."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fp8calib.verification.report import SCALE_ONE, VerifyReport

Json = dict[str, Any]
"""A trace, an axis or a layout of plotly.js."""

INK = "#1f2933"
MUTED = "#52606d"
GRID = "#e4e7eb"
RED = "#d55e00"
BLUE = "#0072b2"
GREEN = "#007a5a"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The style of one series: colour, mark and dash."""

    color: str
    symbol: str
    """plotly's name of the mark."""
    glyph: str
    """The mark as a character, for the legend."""
    dash: str = "solid"


_LONGEST_LABEL = 36
_DASHES = ("solid", "dash", "dashdot")
_MOST_LAYERS_NAMED = 10
_MOST_LARGE_MARKS = 40
_FEWEST_DECADES = 0.7
"""A shorter axis may have no tick at 1, 2 or 5; plotly.js then chooses better ones."""
_MOST_DECADES_WITH_125 = 3.5
_MOST_TICKS = 8

BASELINE = Style(color="#4a5560", symbol="x", glyph="\N{MULTIPLICATION X}", dash="dot")
STYLES = (
    Style(color=BLUE, symbol="circle", glyph="\N{BLACK CIRCLE}"),
    Style(color=RED, symbol="square", glyph="\N{BLACK SQUARE}"),
    Style(color=GREEN, symbol="triangle-up", glyph="\N{BLACK UP-POINTING TRIANGLE}"),
    Style(color="#aa4499", symbol="diamond", glyph="\N{BLACK DIAMOND}"),
    Style(color="#b07d00", symbol="star", glyph="\N{BLACK STAR}"),
    Style(color="#332288", symbol="triangle-down", glyph="\N{BLACK DOWN-POINTING TRIANGLE}"),
)
"""Distinct for every kind of colour vision, and by their marks alone (after Okabe-Ito, Tol)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A candidate's label and style."""

    name: str
    label: str
    """The name, or only its end if it is long."""
    style: Style


def make_series(report: VerifyReport) -> tuple[Series, ...]:
    """Assign each candidate a label and a style, in the report's order."""
    names = [candidate.name for candidate in report.candidates]
    styles = iter([_choose_style(index) for index in range(len(names))])
    return tuple(
        Series(name=name, label=label, style=BASELINE if name == SCALE_ONE else next(styles))
        for name, label in zip(names, _shorten(names), strict=True)
    )


def _choose_style(index: int) -> Style:
    """Cycle through colours and marks, with another dash in every cycle."""
    cycle, place = divmod(index, len(STYLES))
    return replace(STYLES[place], dash=_DASHES[cycle % len(_DASHES)])


def _shorten(names: Sequence[str]) -> Sequence[str]:
    """Keep only the ends of long names (they are paths), unless two ends are the same."""
    short = [_shorten_one(name) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _shorten_one(name: str) -> str:
    if len(name) <= _LONGEST_LABEL:
        return name
    end = name[1 - _LONGEST_LABEL :]
    return "\N{HORIZONTAL ELLIPSIS}" + (end[end.index("/") :] if "/" in end[:-1] else end)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One chart; a plot with several views shows one at a time."""

    label: str
    data: Sequence[Json]
    layout: Json


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """One figure on the page."""

    name: str
    """Its id on the page."""
    title: str
    views: Sequence[View]
    height: int = 320
    """In CSS pixels."""
    is_wide: bool = False
    """Whether it takes the full width of the page instead of half."""

    def to_json(self) -> Json:
        """Encode the plot for page.js."""
        views = [{"label": v.label, "data": v.data, "layout": v.layout} for v in self.views]
        return {"name": self.name, "views": views}


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """Plots that answer one question."""

    title: str
    lead: str
    """How to read the plots."""
    plots: Sequence[Plot]
    findings: Sequence[str] = ()
    """Sentences below the plots."""


def plain(text: str) -> str:
    """Escape text that plotly.js would read as markup."""
    return html.escape(text, quote=False)


def finite(value: float | None, *, above: float = -math.inf) -> float | None:
    """Return a number that can be drawn, or None, which leaves a gap."""
    return value if value is not None and math.isfinite(value) and value > above else None


def make_layout(*, x: Json, y: Json, **more: Any) -> Json:
    """Make a layout in the page's style."""
    return {
        "font": {"family": _FONT, "size": 13, "color": INK},
        "margin": {"l": 64, "r": 16, "t": 12, "b": 48},
        "paper_bgcolor": "white",
        "plot_bgcolor": "white",
        "hovermode": "closest",
        "showlegend": False,
        "xaxis": _axis(x),
        "yaxis": _axis(y),
        **more,
    }


def own_legend() -> Json:
    """Make the settings of a plot's own legend, above the plot."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    return {"showlegend": True, "legend": place}


def title(text: str) -> Json:
    """Name an axis."""
    return {"text": text, "standoff": 8, "font": {"size": 13, "color": MUTED}}


def line(name: str, style: Style, x: Sequence[Any], y: Sequence[float | None], **more: Any) -> Json:
    """Make a line with marks; a None in `y` is a gap."""
    size = 8 if len(x) <= _MOST_LARGE_MARKS else 5
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": x,
        "y": y,
        "line": {"color": style.color, "width": 1.75, "dash": style.dash},
        "marker": {"color": style.color, "symbol": style.symbol, "size": size},
        **more,
    }


def layer_axis(layers: Iterable[int]) -> Json:
    """Name the axis of layers; no tick stands between two of them."""
    axis = {"title": title("layer"), "showgrid": False, "tickangle": 0, "automargin": False}
    return axis | ({"dtick": 1} if len(set(layers)) < _MOST_LAYERS_NAMED else {})


def log_axis(text: str, values: Iterable[float | None]) -> Json:
    """Make a logarithmic axis for `values`, with a few round ticks."""
    drawn = [value for value in values if value is not None and value > 0] or [1.0]
    decades = math.log10(max(drawn)) - math.log10(min(drawn))
    axis = {"title": title(text), "type": "log", "tickformat": ".4~g"}
    if decades < _FEWEST_DECADES:
        ends = [math.log10(min(drawn) / 2), math.log10(max(drawn) * 2)]
        return {**axis, "nticks": 6, "range": ends}
    if decades < _MOST_DECADES_WITH_125:
        return {**axis, "dtick": "D2"}  # plotly's name for 1, 2, 5, 10, ...
    return {**axis, "dtick": math.ceil(decades / _MOST_TICKS)}


def level(value: float, text: str) -> tuple[Json, Json]:
    """Draw a horizontal line across a plot with a logarithmic axis: its shape and its label."""
    stroke = {"color": INK, "width": 1.25, "dash": "dash"}
    shape = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value}
    note = {"text": text, "xref": "paper", "x": 1, "xanchor": "right", "showarrow": False}
    ends = {"y": math.log10(value), "yanchor": "bottom", "yshift": 4, "font": {"size": 12}}
    return {**shape, "line": stroke, "layer": "below"}, {**note, **ends}


def _axis(axis: Json) -> Json:
    style = {"gridcolor": GRID, "zeroline": False, "linecolor": "#9aa5b1", "automargin": True}
    return {**style, "tickcolor": "#9aa5b1", **axis}
