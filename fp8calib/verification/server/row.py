"""The server in a report: a candidate like the emulated ones, and the conclusion."""

from __future__ import annotations

from fp8calib.data.plan import DataPlan
from fp8calib.verification.compare.summary import list_figures, split_positions
from fp8calib.verification.judge.gates import Gate, correct_if_misleading, judge
from fp8calib.verification.report import (
    SCALE_ONE,
    SERVER,
    CandidateResult,
    Decision,
    PairedAnswer,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.server.assess import Assessment
from fp8calib.verification.server.diagnose import Finding


def add_server(
    report: VerifyReport, assessment: Assessment, gate: Gate, plan: DataPlan
) -> VerifyReport:
    """Add the server to a report, before scale 1.0; its diagnosis is the advice."""
    result, summary = assessment.result, assessment.summary
    verdict, why = judge(summary, gate)
    if result.finding == Finding.UNKNOWN and verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}:
        verdict, why = Verdict.WARN, f"{why}, but no candidate explains what the server changes"
    else:
        verdict, why = correct_if_misleading(verdict, why, damage="", summary=summary, gate=gate)
    decoding = result.decoding
    if decoding is not None and decoding.answer == PairedAnswer.WORSE:
        if verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}:
            verdict = Verdict.WARN
        why = f"{why}, but decoding and prompts do not agree"
    row = CandidateResult(
        name=SERVER,
        description=f"{result.kind} at {result.url}, model {result.model}",
        **list_figures(summary),
        verdict=verdict,
        verdict_why=why,
        gate=gate.name,
        by_position=split_positions(-assessment.changes, None, list(map(len, plan.sequences))),
    )
    last = [one for one in report.candidates if one.name == SCALE_ONE]
    others = [one for one in report.candidates if one.name != SCALE_ONE]
    return report.model_copy(
        update={
            "candidates": (*others, row, *last),
            "server": result,
            "decision": Decision(
                headline=result.sentence if decoding is None else decoding.sentence,
                details="" if decoding is None else result.sentence,
            ),
        }
    )
