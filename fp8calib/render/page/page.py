"""A VerifyReport as one HTML page: it runs no script, loads no file and needs no network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.render.page.cache import cache_sections
from fp8calib.render.page.charts import measure
from fp8calib.render.page.histograms import histograms_section, index_histograms
from fp8calib.render.page.linear_maps import linears_section
from fp8calib.render.page.sections import (
    Figure,
    PageSection,
    list_provenance,
    needs_section,
    positions_section,
    sensitivity_section,
)
from fp8calib.render.page.series import Series, make_series
from fp8calib.render.templates import HTML
from fp8calib.render.verify_tables import (
    cache_table,
    choice_tables,
    decoding_table,
    figures_table,
    pairs_table,
    rules_table,
    sites_table,
)
from fp8calib.verification.report import LayerResult, Verdict, VerifyReport, candidates_table

_TITLE = "FP8 verification of "
_HEAD_BYTES = 4096
"""The title is among the first of them."""
_MOST_BYTES = 900_000
"""Of all figures together: a page stays under 1 MB."""
_BADGES = {
    Verdict.PASS: "\N{CHECK MARK}",
    Verdict.WARN: "!",
    Verdict.FAIL: "\N{MULTIPLICATION X}",
    Verdict.NO_DIFFERENCE: "=",
    Verdict.CANNOT_TELL: "?",
}
"""A verdict is never told by its colour alone."""
_MOST_WORST = 12


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
    return HTML.get_template("page/page.html.jinja").render(
        title=_TITLE,
        subject=report.model,
        headline=report.decision.headline,
        details=report.decision.details,
        warnings=report.warnings,
        command=command,
        first=candidates_table(report.candidates, report.refused),
        badges=_BADGES,
        run=_describe_run(report),
        series=series,
        sections=_keep_small(list(list_sections(report, series))),
        provenance=list_provenance(
            report.provenance,
            {"Model": report.model, "Run": f"{report.duration_s:.0f} s on {report.device}"},
        ),
    )


def _describe_run(report: VerifyReport) -> str:
    """Describe the run in one line."""
    parts = (
        f"{report.engine_version or report.engine}, emulated",
        f"{report.tokens:,} tokens in {report.sequences:,} sequences of {', '.join(report.data)}",
        f"computed in {report.dtype} on {report.device}",
        f"perplexity of the unquantized model {report.reference.ppl:.5g}",
    )
    return " \N{MIDDLE DOT} ".join(parts)


def list_sections(report: VerifyReport, series: Sequence[Series]) -> Iterator[PageSection]:
    """List the sections in their order on the page, those without content too."""
    worst = _list_worst(report)
    anchors = index_histograms(report.histograms, [row.site for row in worst])
    labels = {one.name: one.label for one in series}
    has_links = any(row.site in anchors for row in worst)
    yield PageSection(
        title="Candidates in pairs",
        lead="Differences of the KL divergences of the same tokens; below 0 the candidate is "
        "better.",
        table=pairs_table(report),
        is_folded=False,
    )
    yield PageSection(
        title="Types of the KV cache",
        lead="The smallest first. Throughput was not measured.",
        table=cache_table(report),
        is_folded=False,
    )
    yield needs_section(report)
    yield PageSection(
        title="The worst sites",
        lead="The lowest signal to noise over all candidates."
        + " A name links to its histogram." * has_links,
        table=sites_table(worst, labels=labels, anchors=anchors) if worst else None,
        is_folded=False,
    )
    yield sensitivity_section(report.sensitivity)
    yield PageSection(
        title="Scale rules",
        lead="On the text of this verification, the smallest KLD first.",
        table=rules_table(report.rules) if report.rules else None,
        is_folded=False,
    )
    if (choice := report.rule_choice) is not None:
        *_, table = choice_tables(choice)
        yield PageSection(
            title="Rules by what the model loses",
            lead="Chosen on one half of the text, judged on the other.",
            findings=[choice.sentence],
            table=table,
            is_folded=False,
        )
    yield PageSection(
        title="Decoding",
        lead="Text as it is served: a prompt, then tokens one at a time over the quantized cache.",
        findings=[each.sentence for each in report.decoding],
        table=decoding_table(report.decoding) if report.decoding else None,
        is_folded=False,
    )
    yield from cache_sections(report, series)
    yield histograms_section(report.histograms, anchors)
    yield linears_section(report.layers, series)
    yield positions_section(report)
    yield PageSection(
        title="Other figures of the candidates",
        lead="Perplexity, and the rest of the distribution of KL divergences.",
        table=figures_table(report.candidates),
    )


def _list_worst(report: VerifyReport) -> list[LayerResult]:
    """List the most damaged sites over all candidates, each site of a candidate once."""
    rows = [row for row in report.layers if row.sqnr_db is not None]
    return sorted(rows, key=lambda row: row.sqnr_db or 0.0)[:_MOST_WORST]


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
        kept.append(replace(section, figures=figures, findings=[*section.findings, *notes]))
    return kept
