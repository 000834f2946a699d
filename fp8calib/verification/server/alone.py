"""A report of servers alone: nothing was computed here."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.data.plan import DataPlan
from fp8calib.verification.compare.summary import bounded_exp
from fp8calib.verification.judge.gates import Gate
from fp8calib.verification.report import SERVER, Decision, ReferenceResult, VerifyReport
from fp8calib.verification.server.assess import Assessment
from fp8calib.verification.server.row import add_server


def report_alone(
    model: str, engine: str, assessment: Assessment, gate: Gate, plan: DataPlan, duration_s: float
) -> tuple[VerifyReport, Mapping[str, torch.Tensor]]:
    """Make the report of a server beside an unquantized one or a dump, and what --dump writes."""
    mean = float(assessment.reference.double().mean())
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
        reference=ReferenceResult(ppl=bounded_exp(-mean)),
        candidates=(),
        layers=(),
        decision=Decision(headline=""),
        warnings=plan.warnings,
    )
    logprobs = {"reference": assessment.reference, SERVER: assessment.logprobs}
    return add_server(report, assessment, gate, plan), logprobs
