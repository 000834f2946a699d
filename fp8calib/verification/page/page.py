"""A VerifyReport as one HTML page: it runs no script, loads no file and needs no network."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.errors import format_ranges
from fp8calib.text import Table
from fp8calib.verification import tables
from fp8calib.verification.figures import format_db
from fp8calib.verification.judge.fits import LEAST_DB
from fp8calib.verification.page import charts
from fp8calib.verification.page.charts import Curve, Figure, Point, Style
from fp8calib.verification.report import (
    SCALE_ONE,
    LayerResult,
    RunProvenance,
    Verdict,
    VerifyReport,
    candidates_table,
)

_TITLE = "FP8 verification of "
_HEAD_BYTES = 4096
"""The title is among the first of them."""
_MOST_CHARS = 900_000
"""Of all charts together: a page stays under 1 MB."""
_BADGES = {
    Verdict.PASS: "\N{CHECK MARK}",
    Verdict.WARN: "!",
    Verdict.FAIL: "\N{MULTIPLICATION X}",
    Verdict.NO_DIFFERENCE: "=",
    Verdict.CANNOT_TELL: "?",
    "refused": "\N{MULTIPLICATION X}",
}
"""A verdict is never told by its colour alone."""
_MOST_WORST, _MOST_HISTOGRAMS = 12, 120
_ROLES = {"k": "Keys", "v": "Values", "q": "Queries", "input": "Inputs", "weight": "Weights"}
_FITTED = {"fitted power of two": "fitted_db", "per head": "per_head_db"}
"""Scales that only the diagnosis has."""
_HTML = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=StrictUndefined,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """Sentences, a table and figures that answer one question."""

    title: str
    lead: str = ""
    """How to read them."""
    findings: Sequence[str] = ()
    table: Table | None = None
    figures: Sequence[Figure] = ()
    is_folded: bool = False

    @property
    def legend(self) -> list[tuple[Style, str]]:
        """The styles and names of what the figures draw."""
        return list(dict.fromkeys(key for figure in self.figures for key in figure.legend))


def render(*, provenance: RunProvenance | None, facts: Mapping[str, str], **parts: Any) -> str:
    """Render a page: `parts` are the names of the template, `facts` end it with `provenance`."""
    if provenance is not None:
        facts = {
            "Date": provenance.date,
            "Command": provenance.command,
            "Hash of the model": provenance.model_hash,
            "Hash of the text": provenance.data_hash,
            **facts,
            "Versions": ", ".join(" ".join(found) for found in provenance.versions.items()),
        }
    return _HTML.get_template("page.html.jinja").render(facts=facts, **parts)


def write_page(report: VerifyReport, path: Path, *, command: str = "") -> None:
    """Write the page atomically; `command` is the one that the conclusion asks for.

    Raises:
        ExportError: the file cannot be written.
    """
    # Names of files that are not UTF-8 are surrogates here.
    write_file_atomic(path, render_page(report, command=command).encode("utf-8", "replace"))


def is_page(path: Path) -> bool:
    """Whether a file is one that `write_page` wrote."""
    with path.open("rb") as file:
        return f"<title>{_TITLE}".encode() in file.read(_HEAD_BYTES)


def render_page(report: VerifyReport, *, command: str = "") -> str:
    """Render the page as HTML."""
    data = ", ".join(report.data)
    return render(
        title=_TITLE,
        subject=report.model,
        headline=report.decision.headline,
        details=report.decision.details.splitlines(),
        warnings=report.warnings,
        command=command,
        first=candidates_table(report.candidates, report.refused),
        badges=_BADGES,
        run=(
            f"{report.engine_version or report.engine}, emulated",
            f"{report.tokens:,} tokens in {report.sequences:,} sequences of {data}",
            f"computed in {report.dtype} on {report.device}",
            f"perplexity of the unquantized model {report.reference.ppl:.5g}",
        ),
        sections=list(_keep_small(list_sections(report))),
        provenance=report.provenance,
        facts={"Model": report.model, "Run": f"{report.duration_s:.0f} s on {report.device}"},
    )


def _keep_small(sections: Iterator[Section]) -> Iterator[Section]:
    """Leave out the figures that no longer fit into the size of a page, and say how many."""
    left = _MOST_CHARS
    for section in sections:
        kept = []
        for figure in section.figures:
            left -= len(figure.chart)
            kept += [figure] if left > 0 else []
        missing = len(section.figures) - len(kept)
        notes = [f"{missing} more charts are left out: a page has at most 1 MB."] if missing else []
        yield replace(section, figures=kept, findings=[*section.findings, *notes])


def list_sections(report: VerifyReport) -> Iterator[Section]:
    """List the sections in their order on the page, those without content too."""
    free, names = cycle(charts.STYLES), [one.name for one in report.candidates]
    styles = {name: charts.BASELINE if name == SCALE_ONE else next(free) for name in names}
    worst = sorted((row for row in report.layers if row.sqnr_db is not None), key=_rank)
    del worst[_MOST_WORST:]
    order = {row.site: index for index, row in enumerate(worst)}  # the worst first, then by layer
    filled = [row for row in report.histograms if any(row.counts)]
    filled.sort(key=lambda row: (order.get(row.site, len(order)), row.site[-1:], row.layer))
    drawn, missing = filled[:_MOST_HISTOGRAMS], max(len(filled) - _MOST_HISTOGRAMS, 0)
    anchors = {row.site: f"histogram-{index}" for index, row in enumerate(drawn)}
    yield Section(title="Candidates in pairs", table=tables.pairs_table(report))
    yield Section(
        title="KL divergence by position",
        lead="Where it rises, errors in the KV cache accumulate with the length of a sequence.",
        figures=_draw_positions(report, styles),
    )
    yield Section(
        title="Signal to quantization noise by layer",
        lead="Higher is better; 3 dB more is half the noise. Of several tensors in a layer the "
        "worst is shown. A gap: nothing was lost, or the tensor is all zeros.",
        findings=list(_list_needs(report)),
        figures=[f for role in _ROLES if (f := _draw_layers(report, role, styles)) is not None],
    )
    sites = tables.sites_table(worst, has_candidates=True, anchors=anchors)
    has_links = any(row.site in anchors for row in worst)
    lead = "A name links to its histogram." if has_links else ""
    yield Section(title="The worst sites", lead=lead, table=sites if worst else None)
    rules = tables.rules_table(report.rules) if report.rules else None
    yield Section(title="Scale rules", table=rules)
    yield Section(
        title="Magnitudes and the range of the format",
        lead="All values that calibration observed at one site, divided by its scale. In the "
        "shaded ranges FP8 has no values: on the left they become zero, on the right they clip. "
        "Dashed lines are the ends of the range at scale 1.0.",
        figures=[charts.histogram(row, anchors[row.site]) for row in drawn],
        findings=[f"{missing} more sites are not drawn."] if missing else [],
        is_folded=True,
    )
    others = tables.figures_table(report.candidates)
    yield Section(title="Other figures of the candidates", table=others, is_folded=True)


def _rank(row: LayerResult) -> float:
    return math.inf if row.sqnr_db is None else row.sqnr_db


def _draw_positions(report: VerifyReport, styles: Mapping[str, Style]) -> list[Figure]:
    known = [one for one in report.candidates if any(row.kld_mean for row in one.by_position)]
    ranges = max((one.by_position for one in known), key=len, default=())
    places = [(str(row.first), f"positions {row.first} to {row.last}") for row in ranges]
    series = [(one.name, styles[one.name], one.by_position) for one in known]
    x_title = "first position of the range"
    chart = charts.kld_chart("Mean KL divergence", places, series, x_title=x_title, low=-6)
    return [chart] if known else []


def _list_needs(report: VerifyReport) -> Iterator[str]:
    """Say of K, V and q where scale 1.0 does not fit, and what loses nothing at all."""
    unfit = () if report.kv is None else report.kv.sites
    for role, name in _ROLES.items():
        rows = [row for row in report.layers if row.role == role]
        if rows and all(row.sqnr_db is None for row in rows):
            yield f"{name}: nothing is lost, in any layer of any candidate."
        elif ones := [row for row in rows if row.candidate == SCALE_ONE]:
            lost = sorted({row.layer for row in ones if row.site in unfit})
            layers = f"layer{'s' if len(lost) > 1 else ''} {format_ranges(lost)}"
            yield f"{name}: scale 1.0 {f'does not fit {layers}' if lost else 'fits every layer'}."


def _draw_layers(report: VerifyReport, role: str, styles: Mapping[str, Style]) -> Figure | None:
    """Draw the worst SQNR of each layer and candidate, and of fitted scales."""
    worst: dict[tuple[str, int], LayerResult] = {}
    for row in report.layers:
        if row.role == role:
            place = row.candidate, row.layer
            worst[place] = min(row, worst.get(place, row), key=_rank)
    layers = sorted({layer for _, layer in worst})
    curves = []
    for name, style in styles.items():
        found = [worst.get((name, layer)) for layer in layers]
        points = [None if row is None else Point(row.sqnr_db, _describe(row)) for row in found]
        curves.append(Curve(name, style, points))
    fitted = {row.layer: row for row in report.diagnosis if row.site.endswith(f".{role}")}
    for (label, field), style in zip(_FITTED.items(), charts.STYLES[-2:], strict=True):
        dbs = [getattr(fitted.get(layer), field, None) for layer in layers]
        curves.append(Curve(label, style, [Point(db, f"{format_db(db)} dB") for db in dbs]))
    floor = (LEAST_DB, f"below {LEAST_DB:.0f} dB the tensor is lost")
    y = charts.db_axis(
        point.value for curve in curves for point in curve.points if point is not None
    )
    places = [(str(layer), f"layer {layer}") for layer in layers]
    chart = charts.place_chart(_ROLES[role], places, curves, x_title="layer", y=y, floor=floor)
    return chart if chart.legend else None


def _describe(row: LayerResult) -> str:
    return (
        f"{format_db(row.sqnr_db)} dB, amax {row.amax:.4g}, scale {tables.format_scale(row)}, "
        f"{row.clipped:.3%} clipped, {row.flushed:.3%} zeroed"
    )
