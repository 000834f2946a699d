"""Maps of weights and inputs: a cell for each layer and projection, one candidate at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from fp8calib.verification.html.plots import (
    Json,
    PageSection,
    Plot,
    Series,
    View,
    finite,
    layer_axis,
    make_layout,
    plain,
)
from fp8calib.verification.report import LayerResult

_ROLES = {"input": "inputs", "weight": "weights"}
_MEASURES = {"sqnr": "SQNR, dB", "clipped": "Share clipped", "flushed": "Share flushed to zero"}
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")


def linears_section(rows: Sequence[LayerResult], series: Sequence[Series]) -> PageSection:
    """Make the maps of SQNR and lost values of weights and inputs."""
    plots = []
    for measure, words in _MEASURES.items():
        views = list(_draw_views(rows, series, measure))
        most = max((len(view.data[0]["y"]) for view in views), default=0)
        name, height = f"linear-{measure}", 150 + 28 * most
        plots.append(Plot(name=name, title=words, views=views, height=height, is_wide=True))
    return PageSection(
        title="Weights and activations of the linear layers",
        lead="One candidate at a time; dark is worse. Experts of a layer share a cell, which shows "
        "the worst of them.",
        plots=[plot for plot in plots if plot.views],
    )


def _draw_views(
    rows: Sequence[LayerResult], series: Sequence[Series], measure: str
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


def _draw_map(rows: Sequence[LayerResult], measure: str) -> Json:
    cells: dict[tuple[str, int], list[LayerResult]] = {}
    for row in rows:
        cells.setdefault((_name_projection(row), row.layer), []).append(row)
    places = list(dict.fromkeys(place for place, _ in cells))
    layers = sorted({layer for _, layer in cells})
    is_share = measure != "sqnr"
    return {
        "type": "heatmap",
        "x": layers,
        "y": [plain(place) for place in places],
        "z": [
            [_pick_worst(cells.get((place, at), []), measure) for at in layers] for place in places
        ],
        "colorscale": "Cividis",
        "reversescale": is_share,
        "zmin": 0 if is_share else None,
        "colorbar": _color_bar(".3~%" if is_share else ""),
        "hovertemplate": f"layer %{{x}}, %{{y}}<br>{_MEASURES[measure]}: "
        f"%{{z:{'.3~%' if is_share else '.2f'}}}<extra></extra>",
    }


def _pick_worst(rows: Sequence[LayerResult], measure: str) -> float | None:
    """Pick the worst value of the tensors that share a cell: the lowest SQNR, the largest share."""
    if measure == "sqnr":
        return min((db for row in rows if (db := finite(row.sqnr_db)) is not None), default=None)
    return max((getattr(row, measure) for row in rows), default=None)


def _name_projection(row: LayerResult) -> str:
    """Name a projection within its layer, the same for all experts: `mlp.experts.*.up_proj`."""
    module = row.site.removesuffix(f".{row.role}")
    _, _, inside = module.partition(f".{row.layer}.")
    return _EXPERT.sub("*", inside or module)


def _color_bar(tick_format: str) -> Json:
    """Place the colour bar above the map, at full width."""
    place = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    size = {"thickness": 10, "len": 1, "xpad": 0, "ypad": 0, "outlinewidth": 0}
    return {**place, **size, "tickformat": tick_format}
