"""Ask vLLM's own loader what it does with a checkpoint."""

from __future__ import annotations

import sys
from pathlib import Path

from fp8calib.commands.check import CheckRequest, CheckResult
from fp8calib.commands.checked import check_path
from fp8calib.commands.request import Reporter, as_function
from fp8calib.engines.replay.verdicts import CheckReport
from fp8calib.model.shapes import ModelGeometry
from fp8calib.plugins.vllm.commands.check.request import VllmCheckRequest
from fp8calib.plugins.vllm.loader import amend_by_loader, ask_loader


def run(request: VllmCheckRequest, reporter: Reporter) -> CheckResult:  # noqa: ARG001
    """Load a folder with vLLM's loader, and amend what the replay says by its answer.

    Raises:
        UsageError: there is no such folder, or no vLLM in the environment.
        ModelError: the checkpoint cannot be read.
    """
    python = Path(request.python or sys.executable)

    def amend(report: CheckReport, path: Path, geometry: ModelGeometry) -> CheckReport:
        (key,) = report.engines
        replayed = report.engines[key]
        answer = ask_loader(path, python, has_kv=replayed.asks_for_kv, tp=request.tp)
        amended = amend_by_loader(replayed, answer, geometry)
        return report.model_copy(update={"engines": {key: amended}})

    asked = CheckRequest(request.path, engine="vllm", tp=request.tp)
    return check_path(asked, amend=amend)


check = as_function("check", VllmCheckRequest, run)
