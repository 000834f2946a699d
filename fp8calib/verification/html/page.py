"""A VerifyReport as one HTML page: it runs no script, loads no file and needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path
from xml.etree.ElementTree import Element

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.verification.html.cache import cache_sections
from fp8calib.verification.html.histograms import histograms_section, index_histograms
from fp8calib.verification.html.linear_maps import linears_section
from fp8calib.verification.html.markup import element, measure, write_html
from fp8calib.verification.html.sections import (
    Figure,
    PageSection,
    needs_section,
    positions_section,
    sensitivity_section,
)
from fp8calib.verification.html.series import Series, Style, make_series
from fp8calib.verification.html.tables import (
    candidates_table,
    describe_run,
    figures_table,
    list_provenance,
    list_worst_sites,
    rules_table,
    tasks_table,
    worst_table,
)
from fp8calib.verification.report import VerifyReport

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
"""The browser runs no script and loads nothing."""
_TITLE = "FP8 verification of "
_HEAD_BYTES = 4096
"""The title is among the first of them."""
_MOST_BYTES = 900_000
"""Of all figures together: a page stays under 1 MB."""


def write_page(report: VerifyReport, path: Path, *, command: str = "") -> None:
    """Write the page atomically; an existing file is replaced.

    `command` is the one that the conclusion asks for; empty without one.

    Raises:
        UsageError: the path cannot be a file.
        ExportError: the file cannot be written.
    """
    page = render_page(report, command=command)
    write_file_atomic(path, page.encode("utf-8", "replace"))


def is_page(path: Path) -> bool:
    """Whether a file is one that `write_page` wrote."""
    with path.open("rb") as file:
        return f"<title>{_TITLE}".encode() in file.read(_HEAD_BYTES)


def render_page(report: VerifyReport, *, command: str = "") -> str:
    """Render the page as HTML."""
    series = make_series(report)
    sections = list(list_sections(report, series))
    shown = _keep_small(sections)
    opened = [_render_section(section) for section in shown if not section.is_folded]
    folded = [_render_section(section) for section in shown if section.is_folded]
    legend = [_render_legend(series)] if any(s.figures for s in shown) else []
    main = element(
        "main",
        *_render_answer(report, command),
        *opened,
        *legend,
        *folded,
        _render_footer(report),
    )
    return write_html(
        element("html", _render_head(report, series), element("body", main), lang="en")
    )


def list_sections(report: VerifyReport, series: Sequence[Series]) -> Iterator[PageSection]:
    """List the sections in their order on the page, those without content too."""
    worst = list_worst_sites(report)
    anchors = index_histograms(report.histograms, [row.site for row in worst])
    has_links = any(row.site in anchors for row in worst)
    yield needs_section(report)
    yield PageSection(
        title="The worst sites",
        lead="The lowest signal to noise over all candidates."
        + " A name links to its histogram." * has_links,
        table=worst_table(worst, series, anchors) if worst else None,
        is_folded=False,
    )
    yield sensitivity_section(report.sensitivity)
    yield PageSection(
        title="Scale rules",
        lead="On the text of this verification, best first.",
        table=rules_table(report.rules) if report.rules else None,
        is_folded=False,
    )
    yield PageSection(
        title="Tasks",
        lead="Metrics of the unquantized and the quantized model.",
        table=tasks_table(report.tasks) if report.tasks else None,
        is_folded=False,
    )
    yield from cache_sections(report, series)
    yield histograms_section(report.histograms, anchors)
    yield linears_section(report.layers, series)
    yield positions_section(report)
    yield PageSection(
        title="Other figures of the candidates",
        lead="Perplexity, and the rest of the distribution of KL divergences.",
        table=figures_table(report),
    )


def _keep_small(sections: Sequence[PageSection]) -> list[PageSection]:
    """Leave out the figures that no longer fit into the size of a page, and say how many."""
    left = _MOST_BYTES
    kept: list[PageSection] = []
    for section in sections:
        if section.is_empty:
            continue
        figures: list[Figure] = []
        for figure in section.figures:
            left -= measure(figure.chart)
            if left > 0:
                figures.append(figure)
        missing = len(section.figures) - len(figures)
        notes = [f"{missing} more charts are left out: a page has at most 1 MB."] if missing else []
        kept.append(
            PageSection(
                title=section.title,
                lead=section.lead,
                figures=figures,
                findings=[*section.findings, *notes],
                table=section.table,
                is_folded=section.is_folded,
            )
        )
    return kept


def _render_head(report: VerifyReport, series: Sequence[Series]) -> Element:
    hiding = "\n".join(
        f"main:has(#show-{one.group}:not(:checked)) .{one.group} {{ display: none; }}"
        for one in series
    )
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{_TITLE}{report.model}"),
        element("style", f"{_read_style()}\n{hiding}\n"),
    )


def _render_answer(report: VerifyReport, command: str) -> Iterator[Element]:
    """Render the first screen: the conclusion, the command it asks for, and the candidates."""
    yield element("h1", element("small", "FP8 verification of "), report.model)
    headline = report.decision.headline
    parts = [element("p", headline[:1].upper() + headline[1:], class_="answer")]
    if command:
        parts.append(element("pre", element("code", command), tabindex="0"))
    yield element("div", *parts, class_="card")
    yield candidates_table(report)
    yield element("p", describe_run(report), class_="lead run")
    if report.decision.details:
        yield element("p", report.decision.details, class_="lead")
    if report.warnings:
        items = element("ul", *(element("li", warning) for warning in report.warnings))
        yield element("div", element("h2", "Warnings"), items, class_="card warnings")


def _render_legend(series: Sequence[Series]) -> Element:
    """Render the legend of the folded charts; a candidate's box hides it in all of them."""
    boxes = [
        element(
            "label",
            element("input", type="checkbox", id=f"show-{one.group}", checked=""),
            _render_mark(one.style),
            f" {one.label}",
            title=one.name,
        )
        for one in series
    ]
    heading = element("h2", "Details")
    return element("div", heading, element("div", *boxes, class_="keys"), class_="details")


def _render_mark(style: Style) -> Element:
    return element("span", style.glyph, class_=f"glyph {style.color}", aria_hidden="true")


def _render_section(section: PageSection) -> Element:
    parts = [element("p", section.lead, class_="lead")] if section.lead else []
    if section.findings:
        items = [element("li", finding) for finding in section.findings]
        parts.append(element("ul", *items, class_="findings"))
    if section.table is not None:
        parts.append(section.table)
    if section.figures:
        parts.append(element("div", *map(_render_figure, section.figures), class_="figures"))
    if section.is_folded:
        return element("details", element("summary", section.title), *parts)
    return element("section", element("h2", section.title), *parts)


def _render_figure(figure: Figure) -> Element:
    caption = element("figcaption", element("span", figure.title))
    if figure.legend:
        keys = [element("span", _render_mark(style), f" {name}") for style, name in figure.legend]
        caption.append(element("span", *keys, class_="keys"))
    made = element("figure", caption, figure.chart)
    if figure.anchor:
        made.set("id", figure.anchor)
    return made


def _render_footer(report: VerifyReport) -> Element:
    units = (
        "KLD: Kullback-Leibler divergence from the unquantized model, in nats. SQNR: signal to "
        "quantization noise ratio. \N{PLUS-MINUS SIGN}: one standard error."
    )
    return element(
        "footer", element("h2", "Provenance"), list_provenance(report), element("p", units)
    )


def _read_style() -> str:
    return files("fp8calib.verification.html").joinpath("page.css").read_text(encoding="utf-8")
