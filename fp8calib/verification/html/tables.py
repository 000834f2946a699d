"""The page's tables: facts of the run, verdicts, candidates, scale rules, tasks."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element

from fp8calib.verification.html.markup import Child, element, make_table
from fp8calib.verification.report import (
    CandidateResult,
    RuleResult,
    TaskResult,
    Verdict,
    VerifyReport,
)

_BADGES = {
    Verdict.PASS: "\N{CHECK MARK} pass",
    Verdict.WARN: "! warn",
    Verdict.FAIL: "\N{MULTIPLICATION X} fail",
    Verdict.NO_DIFFERENCE: "= no difference",
}
_NONE = "\N{EM DASH}"


def list_facts(report: VerifyReport) -> Element:
    """List the facts of the run."""
    length = f"{report.sequences:,} sequences of up to {report.seq_len:,}"
    facts = (
        ("Engine", f"{report.engine} ({report.engine_version})"),
        ("Data", ", ".join(report.data)),
        ("Scored tokens", f"{report.tokens:,} in {length}"),
        ("Computed in", report.dtype),
        ("Perplexity, unquantized", f"{report.reference.ppl:.5g}"),
    )
    pairs = [element("div", element("dt", name), element("dd", fact)) for name, fact in facts]
    return element("dl", *pairs, class_="facts")


def list_verdicts(report: VerifyReport) -> Element:
    """List the candidates, each with the badge of its verdict."""
    items = [element("li", _make_badge(one.verdict), one.name) for one in report.candidates]
    return element("ul", *items, class_="verdicts")


def candidates_table(report: VerifyReport) -> Element:
    """Make the table of candidates."""
    kld = ("KLD mean", "KLD median", "KLD p99", "KLD max")
    header = ("Candidate", "Verdict", "Perplexity", "Ratio", *kld, "Top-1 agreement", "Top-1 ties")
    rows = [_candidate_row(one) for one in report.candidates]
    return make_table(header, rows, label="Candidates", words=2)


def _candidate_row(one: CandidateResult) -> Sequence[Child]:
    name = element("div", element("strong", one.name), _make_aside(one.description))
    verdict = element(
        "div", _make_badge(one.verdict), _make_aside(f"{one.verdict_why} (gate: {one.gate})")
    )
    klds = (one.kld_mean, one.kld_median, one.kld_p99, one.kld_max)
    ratio = _format_with_error(one.ppl_ratio, one.ppl_ratio_se)
    numbers = (f"{one.ppl:.5g}", ratio, *(f"{kld:.3g}" for kld in klds))
    return [name, verdict, *numbers, f"{one.top1_agreement:.2%}", f"{one.top1_ties:.2%}"]


def rules_table(rules: Sequence[RuleResult]) -> Element:
    """Make the table of scale rules, best first."""
    header = ("Rule", "Perplexity ratio", "KLD mean")
    rows = [_rule_row(rank, row) for rank, row in enumerate(rules, start=1)]
    return make_table(header, rows, label="Scale rules", words=1)


def _rule_row(rank: int, row: RuleResult) -> Sequence[Child]:
    name = element("div", element("strong", f"{rank}. {row.rule}"), _make_aside(row.candidate))
    return [name, _format_with_error(row.ppl_ratio, row.ppl_ratio_se), f"{row.kld_mean:.3g}"]


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
