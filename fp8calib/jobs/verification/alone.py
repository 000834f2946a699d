"""Compare a server with a dump or with an unquantized server; no model runs here."""

from __future__ import annotations

import time
from dataclasses import replace

from fp8calib.jobs.verification.job import VerifyJob
from fp8calib.machine.progress import Progress
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.server.alone import report_alone
from fp8calib.verification.server.assess import Evidence, assess
from fp8calib.verification.verify import VerificationResult


def run_alone(job: VerifyJob, evidence: Evidence, progress: Progress) -> VerificationResult:
    """Compare the server with the evidence, without running the model.

    Raises:
        ServerError: a server fails.
        ModelError: it has another model.
    """
    assert job.server is not None  # noqa: S101 -- checked with the options
    started = time.monotonic()
    plan, answers = job.server(job.plan, None, progress)
    assessment = assess(answers, replace(evidence, sequences=plan.sequences), progress)
    report, logprobs = report_alone(
        job.name,
        job.options.numerics.name,
        assessment,
        job.options.gate or GATES["kv"],
        plan,
        time.monotonic() - started,
    )
    return VerificationResult(report=report, logprobs=logprobs, data=plan.fingerprint)
