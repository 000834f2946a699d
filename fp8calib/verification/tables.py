"""Figures, comparisons and tables of a verification as a terminal and the page show them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from fp8calib.numerics.formats import MOST_CLIPPED
from fp8calib.text import Cell, Table
from fp8calib.verification.report import (
    LEAST_DB,
    SCALE_ONE,
    LayerResult,
    PairedResult,
    RuleResult,
    VerifyReport,
)

_SMALLEST_FIXED_KLD = 0.001


def format_mean_kld(kld: float | None, se: float | None) -> str:
    """Format a mean divergence with its standard error, `?` if that is unknown."""
    return format_kld(kld, se) + (" ± ?" if kld is not None and se is None else "")


def format_kld(kld: float | None, se: float | None = None) -> str:
    """Format a divergence with at least two significant digits; `-` if it is unknown."""
    if kld is None:
        return "-"
    if kld and abs(kld) < _SMALLEST_FIXED_KLD and (not se or se < _SMALLEST_FIXED_KLD / 10):
        return f"{kld:.2e}" + ("" if se is None else f" ± {se:.1e}")
    # With four decimals, or as many as give the standard error one significant digit.
    decimals = min(max(4, -math.floor(math.log10(se))), 9) if se else 4
    return f"{kld:.{decimals}f}" + ("" if se is None else f" ± {se:.{decimals}f}")


def format_ratio(ratio: float, error: float | None) -> str:
    """Format a perplexity ratio with its standard error, `?` if that is unknown."""
    shown = "?" if error is None else f"{error:.4f}"
    return f"{ratio:.3g}" if ratio >= 1e5 else f"{ratio:.4f} ± {shown}"


def format_share(share: float | None) -> str:
    """Format a share; `-` if unknown."""
    if share is None:
        return "-"
    return "<0.01%" if 0 < share < 0.00005 else f"{share:.2%}"


def format_difference(paired: PairedResult) -> str:
    """Format a difference of divergences with its sign and its standard error."""
    sign, unknown = "+" if paired.difference >= 0 else "-", ", error unknown" * (paired.se is None)
    return f"{sign}{format_kld(abs(paired.difference), paired.se)}{unknown}"


def describe_pair(paired: PairedResult) -> str:
    """Describe what a comparison tells, as the predicate of the candidate."""
    if paired.difference == 0 and paired.se == 0:
        return "has the same KLD in every sequence"
    words = {
        "better": "is better",
        "worse": "is worse",
        "no-difference": "makes no difference",
        "cannot-tell": "differs by less than this text can tell",
    }
    told = words[paired.answer]
    has_few = paired.se is not None and abs(paired.difference) > 2 * paired.se
    if has_few and paired.answer == "cannot-tell":
        told = "may differ, which so few sequences cannot tell"
    return f"{told} (KLD {format_difference(paired)}{tell_more(paired)})"


def tell_more(paired: PairedResult) -> str:
    """Say how many tokens would tell, to two digits; empty if it is told, or unknown."""
    if paired.tokens_to_tell is None:
        return ""
    return f"; about {float(f'{paired.tokens_to_tell:.2g}'):,.0f} tokens would tell"


# --- tables ---------------------------------------------------------------------------------------


def candidates_table(report: VerifyReport, *, best: str = "") -> Table:
    """Make the table of candidates; `best` is marked.

    Verdicts have a column only with a gate that was asked for.
    """
    rows: list[list[str | Cell]] = [
        [
            Cell(each.name + " *" * (each.name == best), aside=each.description, kind="name"),
            Cell(
                each.verdict.value,
                aside=f"{each.verdict_why} ({each.gate} gate)",
                kind=each.verdict,
            ),
            format_mean_kld(each.kld_mean, each.kld_se),
            format_kld(each.kld_p99),
            format_ratio(each.ppl_ratio, each.ppl_ratio_se),
            format_share(each.top1_agreement),
        ]
        for each in report.candidates
    ]
    for refused in report.refused:
        why = Cell("refused", aside=refused.reason, kind="refused")
        rows.append([Cell(refused.name, kind="name"), why, *["-"] * 4])
    columns = ["candidate", "verdict", "KLD mean ± se", "KLD p99", "ratio ± se", "same token"]
    title = "* the one to use" if best else ""
    table = Table(title=title, columns=columns, rows=rows, words=(0, 1))
    return table if report.has_gate or report.refused else table.without("verdict")


def sites_table(
    layers: Sequence[LayerResult], *, title: str = "", has_candidates: bool = False
) -> Table:
    """Make a table of tensors; figures beyond the limits of the tool are marked as bad.

    With `has_candidates` the rows are of several candidates.
    """
    named = ["candidate"] if has_candidates else []
    rows: list[list[str | Cell]] = []
    for each in layers:
        is_lost = each.sqnr_db is not None and each.sqnr_db < LEAST_DB
        # none where nothing was lost, or the tensor was all zeros
        sqnr = "-" if each.sqnr_db is None else f"{each.sqnr_db:.1f}"
        scale = f"dynamic, per {each.scale_per}"
        if each.scale is not None:
            scale = f"{each.scale:.4g}"
            if (least := each.smallest_scale) is not None:
                scale = f"{least:.3g} to {each.scale:.3g} per {each.scale_per}"
        row: list[str | Cell] = [
            each.site,
            *([each.candidate] if has_candidates else []),
            Cell(sqnr, kind="bad" if is_lost else ""),
            Cell(format_share(each.clipped), kind="bad" if each.clipped > MOST_CLIPPED else ""),
            format_share(each.flushed),
            f"{each.amax:.4g}",
            scale,
        ]
        rows.append(row)
    columns = ["tensor", *named, "SQNR dB", "clipped", "zeroed", "amax", "scale"]
    return Table(title=title, columns=columns, rows=rows, words=range(1 + len(named)))


def join_readers(rows: Iterable[LayerResult]) -> list[LayerResult]:
    """Join the rows of linears that read the same input: `q_proj.input (and k_proj, v_proj)`."""
    alike: dict[tuple[object, ...], list[LayerResult]] = {}
    for row in rows:
        reader = row.site.rsplit(".", 2)[0] if row.role == "input" else row.site
        figures = (row.sqnr_db, row.clipped, row.flushed, row.amax, row.scale)
        alike.setdefault((row.candidate, reader, *figures), []).append(row)
    joined = []
    for first, *more in alike.values():
        names = ", ".join(row.site.split(".")[-2] for row in more)
        named = f"{first.site} (and {names})" if more else first.site
        joined.append(first.model_copy(update={"site": named}))
    return joined


def rules_table(rules: Sequence[RuleResult]) -> Table:
    """Make the table of scale rules, the smallest divergence first."""
    rows = [
        [
            each.rule,
            format_mean_kld(each.kld_mean, each.kld_se),
            "-" if each.against_best is None else describe_pair(each.against_best),
            format_ratio(each.ppl_ratio, each.ppl_ratio_se),
        ]
        for each in rules
    ]
    return Table(
        title=f"{rules[0].candidate}: scale rules on this text, the smallest KLD first",
        columns=["rule", "KLD mean ± se", "against the first", "ratio ± se"],
        rows=rows,
        words=(0, 2),
    )


def list_shown_pairs(report: VerifyReport) -> Iterator[PairedResult]:
    """List the comparisons to show: with scale 1.0 or else the best of its kind."""
    klds = {one.name: one.kld_mean or 0.0 for one in report.candidates}
    for pair in report.comparisons:
        bases = {each.base for each in report.comparisons if each.candidate == pair.candidate}
        best = min(bases, key=lambda name: klds[name])
        if pair.base == (SCALE_ONE if SCALE_ONE in bases else best):
            yield pair
