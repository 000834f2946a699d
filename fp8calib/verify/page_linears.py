"""Maps of weights and inputs: a cell for each layer and projection, one candidate at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from fp8calib.verify.page_candidates import Series
from fp8calib.verify.page_layers import LAYER_AXIS
from fp8calib.verify.page_plots import Json, Plot, Section, View, finite, make_layout, plain
from fp8calib.verify.report import LayerResult

_ROLES = {"input": "inputs", "weight": "weights"}
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")

_Pick = Callable[[Sequence[LayerResult]], float | None]


def linears_section(rows: Sequence[LayerResult], series: Sequence[Series]) -> Section:
    """Give the maps of SQNR and of losses of the tensors around linear layers."""
    measures: tuple[tuple[str, str, _Pick, Json], ...] = (
        ("sqnr", "SQNR, dB", _lowest_sqnr, {"colorscale": "Cividis"}),
        ("clipped", "Share clipped", _most_clipped, _LOSS_COLORS),
        ("flushed", "Share flushed to zero", _most_flushed, _LOSS_COLORS),
    )
    plots = [
        plot
        for name, words, pick, colors in measures
        if (plot := _draw_maps(rows, series, name, words, pick, colors)).views
    ]
    return Section(
        title="Weights and activations of the linear layers",
        lead="One candidate at a time; dark is worse. Experts of a layer share a cell: the worst "
        "of them is shown.",
        plots=plots,
    )


_LOSS_COLORS: Json = {"colorscale": "Cividis", "reversescale": True, "zmin": 0}


def _lowest_sqnr(rows: Sequence[LayerResult]) -> float | None:
    known = [row.sqnr_db for row in rows if finite(row.sqnr_db) is not None]
    return min((db for db in known if db is not None), default=None)


def _most_clipped(rows: Sequence[LayerResult]) -> float | None:
    return max((row.clipped for row in rows), default=None)


def _most_flushed(rows: Sequence[LayerResult]) -> float | None:
    return max((row.flushed for row in rows), default=None)


def _draw_maps(
    rows: Sequence[LayerResult],
    series: Sequence[Series],
    name: str,
    words: str,
    pick: _Pick,
    colors: Json,
) -> Plot:
    views = []
    for one in series:
        for role, kind in _ROLES.items():
            chosen = [r for r in rows if r.candidate == one.name and r.role == role]
            trace = _draw_map(chosen, pick)
            if any(value for line in trace["z"] for value in line):
                bar = _color_bar(words)
                data = [{**trace, **colors, "colorbar": bar, "hovertemplate": _hover(words)}]
                views.append(View(label=f"{kind}, {one.label}", data=data, layout=_LAYOUT))
    most = max((len(view.data[0]["y"]) for view in views), default=0)
    height = 150 + 28 * most
    return Plot(name=f"linear-{name}", title=words, views=views, height=height, is_wide=True)


def _draw_map(rows: Sequence[LayerResult], pick: _Pick) -> Json:
    cells: dict[tuple[str, int], list[LayerResult]] = {}
    for row in rows:
        cells.setdefault((_find_place(row), row.layer), []).append(row)
    places = list(dict.fromkeys(place for place, _ in cells))
    layers = sorted({layer for _, layer in cells})
    z = [[pick(cells.get((place, layer), [])) for layer in layers] for place in places]
    return {"type": "heatmap", "x": layers, "y": [plain(place) for place in places], "z": z}


def _find_place(row: LayerResult) -> str:
    """Name a projection inside its layer: `mlp.experts.*.up_proj` of any layer and expert."""
    module = row.site.removesuffix(f".{row.role}")
    _, _, inside = module.partition(f".{row.layer}.")
    return _EXPERT.sub("*", inside or module)


def _color_bar(words: str) -> Json:
    bar = {"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"}
    form = "" if "dB" in words else ".3~%"
    return {
        **bar,
        "thickness": 10,
        "xpad": 0,
        "ypad": 0,
        "len": 1,
        "outlinewidth": 0,
        "tickformat": form,
    }


def _hover(words: str) -> str:
    form = ".2f" if "dB" in words else ".3~%"
    return f"layer %{{x}}, %{{y}}<br>{words}: %{{z:{form}}}<extra></extra>"


_LAYOUT = make_layout(
    x=LAYER_AXIS,
    y={"type": "category", "autorange": "reversed", "showgrid": False},
)
