"""Maps of weights and inputs: a cell for each layer and projection, one candidate at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from fp8calib.verification.html.plots import (
    Json,
    PageSection,
    Plot,
    View,
    finite,
    layer_axis,
    make_layout,
    plain,
)
from fp8calib.verification.html.series import Series
from fp8calib.verification.report import LayerResult

_ROLES = {"input": "inputs", "weight": "weights"}
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measure:
    """What a map shows: its name, title, number formats, and which end of the scale is worse."""

    name: str
    words: str
    tick_format: str
    hover_format: str
    is_worse_above: bool
    pick: Callable[[Sequence[LayerResult]], float | None]
    """Pick the worst value of the tensors that share a cell."""


def linears_section(rows: Sequence[LayerResult], series: Sequence[Series]) -> PageSection:
    """Make the maps of SQNR and lost values of weights and inputs."""
    plots = []
    for measure in _MEASURES:
        views = list(_draw_views(rows, series, measure))
        most = max((len(view.data[0]["y"]) for view in views), default=0)
        name, height = f"linear-{measure.name}", 150 + 28 * most
        plots.append(Plot(name=name, title=measure.words, views=views, height=height, is_wide=True))
    return PageSection(
        title="Weights and activations of the linear layers",
        lead="One candidate at a time; dark is worse. Experts of a layer share a cell, which shows "
        "the worst of them.",
        plots=[plot for plot in plots if plot.views],
    )


def _draw_views(
    rows: Sequence[LayerResult], series: Sequence[Series], measure: _Measure
) -> Iterator[View]:
    """Draw the inputs and the weights of each candidate; a map without values is left out."""
    for one in series:
        for role, kind in _ROLES.items():
            chosen = [row for row in rows if row.candidate == one.name and row.role == role]
            trace = _draw_map(chosen, measure)
            if any(value for cells in trace["z"] for value in cells):
                y = {"type": "category", "autorange": "reversed", "showgrid": False}
                layout = make_layout(x=layer_axis(trace["x"]), y=y)
                yield View(label=f"{kind}, {one.label}", data=[trace], layout=layout)


def _draw_map(rows: Sequence[LayerResult], measure: _Measure) -> Json:
    cells: dict[tuple[str, int], list[LayerResult]] = {}
    for row in rows:
        cells.setdefault((_name_projection(row), row.layer), []).append(row)
    places = list(dict.fromkeys(place for place, _ in cells))
    layers = sorted({layer for _, layer in cells})
    return {
        "type": "heatmap",
        "x": layers,
        "y": [plain(place) for place in places],
        "z": [[measure.pick(cells.get((place, at), [])) for at in layers] for place in places],
        "colorscale": "Cividis",
        "reversescale": measure.is_worse_above,
        "zmin": 0 if measure.is_worse_above else None,
        "colorbar": _color_bar(measure),
        "hovertemplate": f"layer %{{x}}, %{{y}}<br>{measure.words}: "
        f"%{{z:{measure.hover_format}}}<extra></extra>",
    }


def _name_projection(row: LayerResult) -> str:
    """Name a projection within its layer, the same for all experts: `mlp.experts.*.up_proj`."""
    module = row.site.removesuffix(f".{row.role}")
    _, _, inside = module.partition(f".{row.layer}.")
    return _EXPERT.sub("*", inside or module)


def _color_bar(measure: _Measure) -> Json:
    """Place the colour bar above the map, at full width."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    size = {"thickness": 10, "len": 1, "xpad": 0, "ypad": 0, "outlinewidth": 0}
    return {**place, **size, "tickformat": measure.tick_format}


def _lowest_sqnr(rows: Sequence[LayerResult]) -> float | None:
    known = (finite(row.sqnr_db) for row in rows)
    return min((db for db in known if db is not None), default=None)


_MEASURES = (
    _Measure(
        name="sqnr",
        words="SQNR, dB",
        tick_format="",
        hover_format=".2f",
        is_worse_above=False,
        pick=_lowest_sqnr,
    ),
    _Measure(
        name="clipped",
        words="Share clipped",
        tick_format=".3~%",
        hover_format=".3~%",
        is_worse_above=True,
        pick=lambda rows: max((row.clipped for row in rows), default=None),
    ),
    _Measure(
        name="flushed",
        words="Share flushed to zero",
        tick_format=".3~%",
        hover_format=".3~%",
        is_worse_above=True,
        pick=lambda rows: max((row.flushed for row in rows), default=None),
    ),
)
