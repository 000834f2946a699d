"""The report of a verification as text: its answer first and last."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from fp8calib.blocks import Answer, Block, Line, Table
from fp8calib.requests.verify import VerifyRequest
from fp8calib.results.verify import VerifyResult
from fp8calib.verification.figures import format_db, format_mean_kld, format_share
from fp8calib.verification.report import (
    RuleChoiceResult,
    VerifyReport,
    candidates_table,
    describe_pair,
)
from fp8calib.verification.tables import (
    cache_table,
    choice_tables,
    decoding_table,
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
    if (caches := cache_table(result)) is not None:
        yield Line()
        yield caches
    yield from more
    yield from _list_sites(result)
    if result.diagnosis and (result.diagnosis_of or not (request.scheme or request.scales)):
        yield Line()
        yield _tabulate_diagnosis(result)
    yield from _describe_sensitivity(result)
    if result.rules:
        yield Line()
        yield rules_table(result.rules)
    if result.rule_choice is not None:
        yield from describe_choice(result.rule_choice)
    if result.decoding:
        yield Line()
        yield decoding_table(result.decoding)
        yield from (Line(f"  {each.sentence}") for each in result.decoding)
    yield Line()
    yield Answer("\n".join(answer))


def describe_choice(choice: RuleChoiceResult) -> Iterator[Block]:
    """Describe what `auto` chose, and how it was judged."""
    for table in choice_tables(choice):
        yield Line()
        yield table
    yield Line(f"rules: {choice.sentence}")
    if choice.flag:
        yield Line(f"serve with {choice.flag}")


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
        if rows and not candidate.has_own_type:  # no scale of theirs could be another
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


def _describe_sensitivity(report: VerifyReport) -> Iterator[Block]:
    found = report.sensitivity
    if found is None:
        return
    yield Line()
    title = f"{found.candidate}: one layer at a time, on {found.sequences} sequences"
    rows = [
        [
            str(layer.layer),
            format_mean_kld(layer.kld_mean, layer.kld_se),
            f"{layer.ppl_ratio:.4f}",
        ]
        for layer in found.layers[:_SHOWN_SITES]
    ]
    yield Table(title=title, columns=["layer", "KLD mean ± se", "ratio"], rows=rows)
    if found.skip_layers:
        named = ", ".join(map(str, found.skip_layers))
        yield Line(f"layers worth leaving unquantized: {named}  {found.flag}".rstrip())
    else:
        yield Line("no layer is worth leaving unquantized: none stands out")
