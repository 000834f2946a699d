"""The page's tables: candidates, worst sites, scale rules, tasks, provenance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from xml.etree.ElementTree import Element

from fp8calib.verification.html.markup import Child, element, make_table
from fp8calib.verification.html.series import Series
from fp8calib.verification.judge.damaged import LEAST_DB, MOST_CLIPPED
from fp8calib.verification.report import (
    CandidateResult,
    LayerResult,
    RuleResult,
    TaskResult,
    Verdict,
    VerifyReport,
    format_db,
    format_difference,
    format_kld,
)

_BADGES = {
    Verdict.PASS: "\N{CHECK MARK} pass",
    Verdict.WARN: "! warn",
    Verdict.FAIL: "\N{MULTIPLICATION X} fail",
    Verdict.NO_DIFFERENCE: "= no difference",
    Verdict.CANNOT_TELL: "? cannot tell",
}
_MOST_WORST = 12
_NONE = "\N{EM DASH}"


def describe_run(report: VerifyReport) -> str:
    """Describe the run in one line."""
    parts = (
        f"{report.engine_version or report.engine}, emulated",
        f"{report.tokens:,} tokens in {report.sequences:,} sequences of {', '.join(report.data)}",
        f"computed in {report.dtype} on {report.device}",
        f"perplexity of the unquantized model {report.reference.ppl:.5g}",
    )
    return " \N{MIDDLE DOT} ".join(parts)


def candidates_table(report: VerifyReport) -> Element:
    """Make the table of candidates."""
    header = ("Candidate", "Verdict", "KLD mean", "Perplexity ratio", "KLD p99", "Top-1 agreement")
    rows: list[Sequence[Child]] = [
        [
            element("div", element("strong", one.name), _make_aside(one.description)),
            element(
                "div",
                _make_badge(one.verdict),
                _make_aside(f"{one.verdict_why} ({one.gate} gate)"),
            ),
            format_kld(one.kld_mean, one.kld_se),
            _format_with_error(one.ppl_ratio, one.ppl_ratio_se),
            _format_kld(one.kld_p99),
            _format_share(one.top1_agreement),
        ]
        for one in report.candidates
    ]
    return make_table(header, rows, label="Candidates", words=2)


def figures_table(report: VerifyReport) -> Element:
    """Make the table of the figures that the table of candidates leaves out."""
    header = ("Candidate", "Perplexity", "KLD median", "KLD max", "Top-1 ties")
    rows: list[Sequence[Child]] = [(one.name, *_list_figures(one)) for one in report.candidates]
    return make_table(header, rows, label="Other figures", words=1)


def _list_figures(one: CandidateResult) -> tuple[str, ...]:
    klds = (_format_kld(one.kld_median), _format_kld(one.kld_max))
    return (f"{one.ppl:.5g}", *klds, _format_share(one.top1_ties))


def _format_kld(value: float | None) -> str:
    return _NONE if value is None else f"{value:.3g}"


def _format_share(value: float | None) -> str:
    return _NONE if value is None else f"{value:.2%}"


def list_worst_sites(report: VerifyReport) -> list[LayerResult]:
    """List the most damaged sites over all candidates, each site of a candidate once."""
    rows = [row for row in report.layers if row.sqnr_db is not None]
    return sorted(rows, key=lambda row: row.sqnr_db or 0.0)[:_MOST_WORST]


def worst_table(
    rows: Sequence[LayerResult], series: Sequence[Series], anchors: Mapping[str, str]
) -> Element:
    """Make the table of the most damaged sites; `anchors` are the ids of their histograms."""
    labels = {one.name: one.label for one in series}
    header = ("Site", "Candidate", "SQNR, dB", "Clipped", "Flushed", "amax", "Scale")
    cells: list[Sequence[Child]] = []
    for row in rows:
        anchor = anchors.get(row.site)
        site: Child = row.site if anchor is None else element("a", row.site, href=f"#{anchor}")
        lost = row.sqnr_db is not None and row.sqnr_db < LEAST_DB
        cells.append(
            [
                site,
                labels.get(row.candidate, row.candidate),
                _mark(format_db(row.sqnr_db), is_bad=lost),
                _mark(f"{row.clipped:.2%}", is_bad=row.clipped > MOST_CLIPPED),
                f"{row.flushed:.2%}",
                f"{row.amax:.4g}",
                "dynamic" if row.scale is None else f"{row.scale:.4g}",
            ]
        )
    return make_table(header, cells, label="Worst sites", words=2)


def _mark(text: str, *, is_bad: bool) -> Child:
    """Mark a figure beyond the tool's limits, by weight and sign and not by colour alone."""
    return element("strong", f"! {text}", class_="bad") if is_bad else text


def rules_table(rules: Sequence[RuleResult]) -> Element:
    """Make the table of scale rules, best first."""
    header = ("Rule", "KLD mean", "Difference from the first", "Perplexity ratio")
    rows = [_rule_row(rank, row) for rank, row in enumerate(rules, start=1)]
    return make_table(header, rows, label="Scale rules", words=1)


def _rule_row(rank: int, row: RuleResult) -> Sequence[Child]:
    name = element("div", element("strong", f"{rank}. {row.rule}"), _make_aside(row.candidate))
    ratio = _format_with_error(row.ppl_ratio, row.ppl_ratio_se)
    paired = _NONE if row.against_best is None else format_difference(row.against_best)
    return [name, format_kld(row.kld_mean, row.kld_se), paired, ratio]


def tasks_table(tasks: Sequence[TaskResult]) -> Element:
    """Make the table of task metrics, unquantized and quantized."""
    header = ("Task", "Candidate", "Unquantized", "Quantized", "Recovery")
    return make_table(header, [_task_row(row) for row in tasks], label="Tasks", words=2)


def _task_row(row: TaskResult) -> Sequence[Child]:
    name = element("div", element("strong", row.task), _make_aside(row.metric))
    before = _format_with_error(row.reference, row.reference_se)
    after = _format_with_error(row.value, row.value_se)
    percent = row.recovery_percent
    return [name, row.candidate, before, after, _NONE if percent is None else f"{percent:.1f} %"]


def _make_badge(verdict: Verdict) -> Element:
    return element("span", _BADGES[verdict], class_=f"badge {verdict}")


def _make_aside(text: str) -> Element:
    return element("span", text, class_="aside")


def _format_with_error(value: float, error: float | None) -> str:
    """Format a number and its standard error with the same decimals."""
    if value >= 1e5:
        return f"{value:.3g}"
    return f"{value:.4f}" + ("" if error is None else f" \N{PLUS-MINUS SIGN} {error:.4f}")


def list_provenance(report: VerifyReport) -> Element:
    """List what the figures come from: date, command, hashes and versions."""
    facts = {"Model": report.model, "Run": f"{report.duration_s:.0f} s on {report.device}"}
    if (origin := report.provenance) is not None:
        facts = {
            "Date": origin.date,
            "Command": origin.command,
            "Hash of the model": origin.model_hash,
            "Hash of the text": origin.data_hash,
            **facts,
            "Versions": ", ".join(f"{name} {found}" for name, found in origin.versions.items()),
        }
    pairs = [
        element("div", element("dt", name), element("dd", fact)) for name, fact in facts.items()
    ]
    return element("dl", *pairs, class_="facts")
