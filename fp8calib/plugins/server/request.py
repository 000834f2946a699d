"""The request of `fp8calib server`."""

from __future__ import annotations

from dataclasses import KW_ONLY
from pathlib import Path

from fp8calib.commands.request import option, request_class
from fp8calib.commands.verify import VerifyRequest


@request_class
class _Url:
    """The first argument; without slots, so that a class of two bases has one layout."""

    url: str = option("URL", "A running vLLM or SGLang server.")


@request_class
class ServerRequest(VerifyRequest, _Url):
    """Name the candidate that explains the answers of a vLLM or SGLang server.

    Its API key is the variable FP8CALIB_SERVER_KEY.

    Example: fp8calib server http://localhost:8000 MODEL --scales MODEL-fp8calib
    """

    _: KW_ONLY
    server_model: str | None = option(
        "--server-model NAME", "Name of the model, if the server has several.", default=None
    )
    server_kind: str | None = option(
        "--server-kind NAME", "vllm or sglang. Default: recognised.", default=None
    )
    server_logprobs: int = option(
        "--server-logprobs K",
        "Likely tokens to ask for.",
        least=0,
        default=1,
    )
    server_concurrency: int = option(
        "--server-concurrency N", "Requests sent at once.", least=1, most=256, default=4
    )
    server_timeout: float = option(
        "--server-timeout SECONDS",
        "Longest wait.",
        least=1.0,
        default=600.0,
    )
    decode: bool = option(
        "--decode",
        "Also score half of each sequence token by token.",
        default=False,
    )
    sampled: bool = option(
        "--sampled",
        "Score text of the unquantized model: estimates KLD.",
        default=False,
    )
    reference_server: str | None = option(
        "--reference-server URL",
        "Unquantized (key: FP8CALIB_REFERENCE_SERVER_KEY).",
        default=None,
    )
    reference_server_model: str | None = option(
        "--reference-server-model NAME",
        "Its model, if it has several.",
        default=None,
    )
    reference_dump: str | Path | None = option(
        "--reference-dump FILE",
        "What --dump wrote elsewhere; computes nothing.",
        reads=Path,
        default=None,
    )
