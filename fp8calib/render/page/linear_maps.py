"""Maps of weights and inputs: a cell for each layer and projection, one map per candidate."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from xml.etree.ElementTree import Element

from fp8calib.render.page.charts import heat_map
from fp8calib.render.page.sections import Figure, PageSection
from fp8calib.render.page.series import Series, Style
from fp8calib.verification.figures import format_db
from fp8calib.verification.judge.damaged import LEAST_DB
from fp8calib.verification.report import LayerResult

_ROLES = {"input": "inputs", "weight": "weights"}
_EXPERT = re.compile(r"(?<=experts\.)\d+(?=\.)")
_STEPS_DB = (LEAST_DB, 20.0, 25.0, 30.0)
"""The borders of the map's five colours."""
_LEGEND = [
    (Style(color=f"h{step}", glyph="\N{BLACK SQUARE}"), name)
    for step, name in enumerate([*(f"< {db:.0f}" for db in _STEPS_DB), "more dB"])
]


def linears_section(rows: Sequence[LayerResult], series: Sequence[Series]) -> PageSection:
    """Make the maps of the SQNR of weights and inputs."""
    return PageSection(
        title="Weights and activations of the linear layers",
        lead=f"The SQNR of each tensor, in dB; below {LEAST_DB:.0f} dB the tensor is lost. Experts "
        "of a layer share a cell, which shows the worst of them.",
        figures=list(_draw_maps(rows, series)),
    )


def _draw_maps(rows: Sequence[LayerResult], series: Sequence[Series]) -> Iterator[Figure]:
    """Draw the inputs and the weights of each candidate; a map without values is left out."""
    for one in series:
        for role, kind in _ROLES.items():
            chosen = [row for row in rows if row.candidate == one.name and row.role == role]
            if any(row.sqnr_db is not None for row in chosen):
                title = f"{one.label}: {kind}"
                yield Figure(title=title, chart=_draw_map(title, chosen), legend=_LEGEND)


def _draw_map(title: str, rows: Sequence[LayerResult]) -> Element:
    cells: dict[tuple[str, int], LayerResult] = {}
    for row in rows:
        place = (_name_projection(row), row.layer)
        cells[place] = min(
            (row, cells.get(place, row)),
            key=lambda one: math.inf if one.sqnr_db is None else one.sqnr_db,
        )
    places = list(dict.fromkeys(place for place, _ in cells))
    layers = sorted({layer for _, layer in cells})
    made = {place: _make_cell(row) for place, row in cells.items()}
    found = [[made.get((place, layer)) for layer in layers] for place in places]
    names = [_shorten(place) for place in places]
    return heat_map(title, [str(layer) for layer in layers], names, found, x_title="layer")


def _make_cell(row: LayerResult) -> tuple[str, str]:
    step = len(_STEPS_DB) if row.sqnr_db is None else sum(row.sqnr_db >= db for db in _STEPS_DB)
    text = f"layer {row.layer}, {_name_projection(row)}: {format_db(row.sqnr_db)} dB"
    lost = [
        f"{share:.3%} {word}"
        for share, word in ((row.clipped, "clipped"), (row.flushed, "flushed"))
        if share
    ]
    return f"h{step}", ", ".join([text, *lost])


def _name_projection(row: LayerResult) -> str:
    """Name a projection within its layer, the same for all experts: `mlp.experts.*.up_proj`."""
    module = row.site.removesuffix(f".{row.role}")
    _, _, inside = module.partition(f".{row.layer}.")
    return _EXPERT.sub("*", inside or module)


def _shorten(place: str) -> str:
    """Keep the end of a name that is too long for its column."""
    return place if len(place) <= 18 else "\N{HORIZONTAL ELLIPSIS}" + place[-17:]
