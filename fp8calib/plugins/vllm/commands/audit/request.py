"""The request of `fp8calib vllm audit`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.commands import options as shared
from fp8calib.commands.option import Option


@dataclass(frozen=True, slots=True)
class VllmAuditRequest:
    """Compare the KV scales that every rank of a running vLLM holds with what a checkpoint means.

    Its workers need fp8calib's extension. The exit code is that of `fp8calib check`.

    Example: fp8calib vllm audit MODEL-fp8calib/kv-overlay --url http://localhost:8000
    """

    path: Annotated[
        str | Path,
        Option(
            metavar="PATH",
            reads=Path,
            check=shared.require_input("name a checkpoint folder"),
            help="The checkpoint folder or hub id that it serves.",
        ),
    ]
    _: KW_ONLY
    url: Annotated[
        str, Option("--url", metavar="URL", help="The server, with its endpoints for development.")
    ]
