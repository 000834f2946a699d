"""Compare the scales that a running vLLM holds with what a checkpoint means."""

from __future__ import annotations

from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path

from fp8calib.commands import check as core
from fp8calib.commands import options as shared
from fp8calib.commands.check import CheckResult
from fp8calib.commands.request import Reporter, option, request_class

describe = core.describe


@request_class
class VllmAuditRequest:
    """Compare the KV scales that every rank of a running vLLM holds with what a checkpoint means.

    Its workers need fp8calib's extension. The exit code is that of `fp8calib check`.

    Example: fp8calib vllm audit MODEL-fp8calib/kv-overlay --url http://localhost:8000
    """

    path: str | Path = option(
        "PATH",
        "The checkpoint folder or hub id that it serves.",
        reads=Path,
        check=partial(shared.require_input, hint="name a checkpoint folder"),
    )
    _: KW_ONLY
    url: str = option("--url URL", "The server, with its endpoints for development.")


def run(request: VllmAuditRequest, reporter: Reporter) -> CheckResult:  # noqa: ARG001
    """Compare a server with a checkpoint.

    Raises:
        UsageError: there is no such folder.
        ModelError: the checkpoint cannot be read.
        ServerError: the server cannot be reached, sleeps, or lacks the extension.
    """
    from fp8calib.plugins.vllm.live import audit

    return audit(request.url, request.path)
