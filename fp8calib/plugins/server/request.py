"""The request of `fp8calib server`."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.commands.option import Option
from fp8calib.commands.verify import VerifyRequest


@dataclass(frozen=True)
class _Url:
    """The first argument; without slots, so that a class of two bases has one layout."""

    url: Annotated[str, Option(metavar="URL", help="A running vLLM or SGLang server.")]


@dataclass(frozen=True)
class ServerRequest(VerifyRequest, _Url):
    """Name the emulated candidate that explains the answers of a running vLLM or SGLang server.

    Its API key is the variable FP8CALIB_SERVER_KEY.

    Example: fp8calib server http://localhost:8000 MODEL --scales MODEL-fp8calib
    """

    _: KW_ONLY
    server_model: Annotated[
        str | None,
        Option(
            "--server-model",
            metavar="NAME",
            help="Name of the model, if the server has several.",
        ),
    ] = None
    server_kind: Annotated[
        str | None,
        Option("--server-kind", metavar="NAME", help="vllm or sglang. Default: recognised."),
    ] = None
    server_logprobs: Annotated[
        int,
        Option(
            "--server-logprobs",
            metavar="K",
            least=0,
            help="Likely tokens to ask for; more bound KLD better.",
        ),
    ] = 1
    server_concurrency: Annotated[
        int,
        Option(
            "--server-concurrency", metavar="N", least=1, most=256, help="Requests sent at once."
        ),
    ] = 4
    server_timeout: Annotated[
        float,
        Option(
            "--server-timeout",
            metavar="SECONDS",
            least=1.0,
            help="Longest wait for a sequence (asked twice).",
        ),
    ] = 600.0
    decode: Annotated[
        bool,
        Option(
            "--decode",
            help="Also score half of each sequence token by token, as it is served.",
        ),
    ] = False
    sampled: Annotated[
        bool,
        Option(
            "--sampled",
            help="Score text that the unquantized model writes; estimates the KLD.",
        ),
    ] = False
    reference_server: Annotated[
        str | None,
        Option(
            "--reference-server",
            metavar="URL",
            help="An unquantized one (key: FP8CALIB_REFERENCE_SERVER_KEY).",
        ),
    ] = None
    reference_server_model: Annotated[
        str | None,
        Option(
            "--reference-server-model",
            metavar="NAME",
            help="Name of the model, if the server has several.",
        ),
    ] = None
    reference_dump: Annotated[
        str | Path | None,
        Option(
            "--reference-dump",
            metavar="FILE",
            reads=Path,
            help="What --dump wrote on another machine; nothing is computed here.",
        ),
    ] = None
