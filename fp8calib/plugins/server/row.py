"""The server in a report: a candidate like the emulated ones, or alone; and the conclusion."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.data.sequences import DataPlan
from fp8calib.plugins.server.assess import Assessment
from fp8calib.plugins.server.diagnose import ServerFinding
from fp8calib.plugins.server.result import SERVER
from fp8calib.verification.judge.gates import Gate, judge
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    PairedAnswer,
    ReferenceResult,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.summary import compute_ppl, summarize_positions


def add_server(
    report: VerifyReport, assessment: Assessment, gate: Gate, plan: DataPlan
) -> VerifyReport:
    """Add the server to a report, before scale 1.0; its diagnosis is the advice."""
    result, summary = assessment.result, assessment.summary
    verdict, why = judge(summary, gate)
    if result.finding == ServerFinding.UNKNOWN and verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}:
        verdict, why = Verdict.WARN, f"{why}, but no candidate explains what the server changes"
    decoding = result.decoding
    if decoding is not None and decoding.answer == PairedAnswer.WORSE:
        if verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}:
            verdict = Verdict.WARN
        why = f"{why}, but decoding and prompts do not agree"
    row = CandidateResult(
        **dict(summary)
        | {
            "name": SERVER,
            "description": f"{result.kind} at {result.url}, model {result.model}",
        },
        verdict=verdict,
        verdict_why=why,
        gate=gate.name,
        by_position=summarize_positions(assessment.logprobs, assessment.reference, plan.lengths),
    )
    last = [one for one in report.candidates if one.name == SCALE_ONE]
    others = [one for one in report.candidates if one.name != SCALE_ONE]
    return report.model_copy(
        update={
            "candidates": (*others, row, *last),
            "decision": Decision(
                headline=result.sentence if decoding is None else decoding.sentence,
                details="" if decoding is None else result.sentence,
            ),
        }
    )


def report_alone(
    model: str, engine: str, assessment: Assessment, gate: Gate, plan: DataPlan, duration_s: float
) -> tuple[VerifyReport, Mapping[str, torch.Tensor]]:
    """Make the report of a server beside an unquantized one or a dump, and what --dump writes."""
    report = VerifyReport(
        model=model,
        engine=engine,
        engine_version="",
        dtype="unknown",
        device="none",
        data=plan.sources,
        tokens=len(assessment.logprobs),
        sequences=len(plan.sequences),
        seq_len=plan.seq_len,
        duration_s=duration_s,
        reference=ReferenceResult(ppl=compute_ppl(assessment.reference)),
        candidates=(),
        layers=(),
        decision=Decision(headline=""),
        warnings=plan.warnings,
    )
    logprobs = {"reference": assessment.reference, SERVER: assessment.logprobs}
    return add_server(report, assessment, gate, plan), logprobs
