"""Compare what a running vLLM holds with what a checkpoint means."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fp8calib.commands.check import CheckRequest, CheckResult
from fp8calib.commands.checked import check_path
from fp8calib.commands.request import Reporter
from fp8calib.plugins.vllm.commands.audit.request import VllmAuditRequest
from fp8calib.plugins.vllm.compare import compare_ranks
from fp8calib.plugins.vllm.live import ask_ranks, name_engine, within_config


def run(request: VllmAuditRequest, reporter: Reporter) -> CheckResult:  # noqa: ARG001
    """Compare a server with a checkpoint.

    Raises:
        UsageError: there is no such folder.
        ModelError: the checkpoint cannot be read.
        ServerError: the server cannot be reached, sleeps, or lacks the extension.
    """
    return audit(request.url, request.path)


def audit(llm: Any, path: str | Path, *, allow_suspicious: bool = False) -> CheckResult:
    """Compare the KV scales that every rank of a running vLLM holds with what a checkpoint means.

    Args:
        llm: a `vllm.LLM` that was started with `worker_extension_cls`, or the URL of a server.
        path: the checkpoint folder that it serves.
        allow_suspicious: accept scales that are most likely wrong.

    Raises:
        UsageError: the `LLM` was started without the extension, or there is no such folder.
        ModelError: the checkpoint cannot be read.
        ServerError: the server cannot be reached, sleeps, or lacks the extension.
    """
    with within_config(llm):
        ranks = ask_ranks(llm)
        asked = CheckRequest(
            path, engine=name_engine(ranks), tp=ranks[0].tp, allow_suspicious=allow_suspicious
        )
        return check_path(asked, compare=lambda report: compare_ranks(ranks, report))
