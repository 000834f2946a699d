"""The request of `fp8calib vllm audit`."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path

from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class


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
        check=shared.require_input("name a checkpoint folder"),
    )
    _: KW_ONLY
    url: str = option("--url URL", "The server, with its endpoints for development.")
