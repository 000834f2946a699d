"""The tables of a verification, as a terminal and the page show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fp8calib.numerics.histogram_estimates import MOST_CLIPPED
from fp8calib.text import Cell, Table
from fp8calib.verification.figures import format_db, format_kld, format_mean_kld, format_ratio
from fp8calib.verification.judge.fits import LEAST_DB
from fp8calib.verification.report import (
    SCALE_ONE,
    LayerResult,
    PairedResult,
    RuleResult,
    VerifyReport,
    describe_pair,
)


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
        scale = f"dynamic, per {each.scale_per}"
        if each.scale is not None:
            scale = f"{each.scale:.4g}"
            if (least := each.smallest_scale) is not None:
                scale = f"{least:.3g} to {each.scale:.3g} per {each.scale_per}"
        row: list[str | Cell] = [
            each.site,
            *([each.candidate] if has_candidates else []),
            Cell(format_db(each.sqnr_db), kind="bad" if is_lost else ""),
            Cell(f"{each.clipped:.2%}", kind="bad" if each.clipped > MOST_CLIPPED else ""),
            f"{each.flushed:.2%}",
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


def pairs_table(report: VerifyReport) -> Table | None:
    """Make the table of the comparisons in pairs; None without one."""
    rows = [[each.candidate, each.base, describe_pair(each)] for each in list_shown_pairs(report)]
    columns = ["candidate", "against", "difference of KLD ± se"]
    return Table(columns=columns, rows=rows, words=(0, 1, 2)) if rows else None


def texts_table(report: VerifyReport) -> Table | None:
    """Quote the texts that lose most, up to the token that loses most; None without one."""
    rows = [
        [
            str(text.sequence),
            format_kld(text.kld),
            text.worst,
            format_kld(text.worst_kld),
            text.before,
        ]
        for text in report.worst_texts
    ]
    columns = ["sequence", "KLD mean", "worst token", "its KLD", "text before it"]
    return Table(columns=columns, rows=rows, words=(2, 4)) if rows else None
