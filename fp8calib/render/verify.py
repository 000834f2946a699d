"""The report of a verification as text: its answer first and last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8calib.blocks import Answer, Block, Line, Table
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.verify import VerifyResult
from fp8calib.verification.figures import format_db, format_share
from fp8calib.verification.report import (
    VerifyReport,
    candidates_table,
    describe_pair,
)
from fp8calib.verification.tables import (
    list_shown_pairs,
    rules_table,
    sites_table,
)

_SHOWN_SITES = 8


def describe(
    result: VerifyResult, request: VerifyRequest, more: Iterable[Block] = ()
) -> Iterator[Block]:
    """Describe the report, with `more` after its candidates."""
    answer = [*([f"next: {result.next}"] if result.next else []), result.decision.headline]
    yield Line(result.decision.headline)
    if result.decision.details:
        yield Line(result.decision.details)
    yield Line()
    yield from _describe_candidates(result)
    yield from more
    yield from _list_sites(result)
    if result.diagnosis and (result.diagnosis_of or not (request.scheme or request.scales)):
        yield Line()
        yield _tabulate_diagnosis(result)
    if result.rules:
        yield Line()
        yield rules_table(result.rules)
    yield Line()
    yield Answer("\n".join(answer))


def _describe_candidates(report: VerifyReport) -> Iterator[Block]:
    title = (
        f"{report.engine_version}, emulated: {report.tokens:,} tokens in "
        f"{report.sequences} sequences, {report.dtype}: unquantized perplexity "
        f"{report.reference.ppl:.4f}"
    )
    yield candidates_table(report.candidates, report.refused, title=title)
    for candidate in report.candidates:
        yield Line(f"  {candidate.name}: {candidate.description}")
        yield Line(f"    {candidate.verdict} ({candidate.gate} gate): {candidate.verdict_why}")
        for pair in list_shown_pairs(report):
            if pair.candidate == candidate.name:
                yield Line(f"    against {pair.base}: {describe_pair(pair)}")
    for refused in report.refused:
        yield Line(f"  {refused}")


def _list_sites(report: VerifyReport) -> Iterator[Block]:
    for candidate in report.candidates:
        rows = [row for row in report.layers if row.candidate == candidate.name]
        if rows:
            yield Line()
            title = f"{candidate.name}: the {min(_SHOWN_SITES, len(rows))} sites of lowest SQNR"
            yield sites_table(rows[:_SHOWN_SITES], title=title)


def _tabulate_diagnosis(report: VerifyReport) -> Table:
    """List the sites that calibrated scales improve most: those that clip, then by their loss."""
    ranked = sorted(
        report.diagnosis, key=lambda row: (-row.unscaled_clipped, -row.unscaled_loss_db)
    )
    rows = ranked[:_SHOWN_SITES]
    columns = {
        "site": [row.site for row in rows],
        "SQNR at 1.0": [format_db(row.unscaled_db) for row in rows],
        "per tensor": [format_db(row.scaled_db) for row in rows],
        "per head": [format_db(row.per_head_db) for row in rows],
        "fitted": [format_db(row.fitted_db) for row in rows],
        "clipped at 1.0": [f"{row.unscaled_clipped:.2%}" for row in rows],
        "clipped in calibration": [format_share(row.calibration_clipped) for row in rows],
    }
    known = {name: cells for name, cells in columns.items() if any(cell != "-" for cell in cells)}
    of = f" and with the scales of {report.diagnosis_of}" if report.diagnosis_of else ""
    title = f"K, V and q at scale 1.0{of}: SQNR in dB of the {len(rows)} that lose most"
    return Table(title=title, columns=list(known), rows=list(zip(*known.values(), strict=True)))
