"""The request of `fp8calib plan`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY
from pathlib import Path

from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class
from fp8calib.engines.gpus import find_gpu
from fp8calib.engines.registry import find_replayed, list_replayed
from fp8calib.errors import UsageError, suggest
from fp8calib.numerics.rules import parse_rule
from fp8calib.numerics.schemes import SCHEMES

NO_SCHEME = "none"
"""The value of --scheme that leaves all linears in 16 bits."""
RULES = ("amax", "percentile:99.9", "percentile:99", "mse", "1.0")


def read_size(text: object) -> float:
    """Read a size in bytes, or a share of the unquantized model: `70%`, or `0.7` without a unit."""
    spelled = str(text).strip()
    plain = spelled.removesuffix("%").strip()
    try:
        number = float(plain)
    except ValueError:
        number = math.inf  # with a unit
    share = number / 100 if plain != spelled else number
    if share <= 0 or (plain != spelled and share > 1):
        what = "must be above 0" if share <= 0 else "a share is at most 100%"
        raise UsageError(f"--max-bytes {spelled}: {what}", hint="such as 6G, or 70%")
    if share <= 1:
        return share
    return shared.read_gib(spelled, "--max-bytes") * 2**30


def _check_scheme(name: str) -> None:
    if name not in (*SCHEMES, NO_SCHEME):
        hint = suggest(name, (*SCHEMES, NO_SCHEME), what="schemes")
        raise UsageError(f"--scheme {name}: unknown scheme", hint=hint)


@request_class
class PlanRequest(shared.TextOptions):
    """Choose a scheme for each layer, the rule of each K and V, and what stays in 16 bits.

    One budget is given: loss (--max-kld, --max-ratio) or bytes (--max-bytes). Exit code 0 if text
    that was held out confirms the plan, 8 if it does not, 9 if there is too little text to tell.

    Example: fp8calib plan HuggingFaceTB/SmolLM2-135M-Instruct --max-bytes 0.6 --engine vllm==0.33
    """

    model: str | Path = option(shared.UNQUANTIZED)
    data: str | Path | Sequence[str | Path] | None = option(shared.DATA, default=None)
    _: KW_ONLY
    max_kld: float | None = option(
        "--max-kld NATS", "Largest mean KL divergence of a token.", default=None
    )
    max_ratio: float | None = option(
        "--max-ratio R", "Largest perplexity ratio, such as 1.01.", default=None
    )
    max_bytes: str | float | None = option(
        "--max-bytes SIZE",
        "Largest weights and KV cache: GiB (6G), or share (70%).",
        reads=str,
        check=read_size,
        default=None,
    )
    engine: str | Sequence[str] = option(
        "--engine NAME[==VERSION]",
        f"Engine that has to load the files: {', '.join(list_replayed())}; repeat for more.",
        reads=list[str],
        check=find_replayed,
        default=("vllm",),
    )
    gpu: str | None = option(
        "--gpu NAME",
        "Choose only what engines serve on it, such as l40s, h100, b200, mi300x.",
        check=find_gpu,
        default=None,
    )
    scheme: str | Sequence[str] | None = option(
        "--scheme",
        f"To choose from; repeat for more. Default: all that engines load. {NO_SCHEME}: only KV.",
        metavar="|".join([*SCHEMES, NO_SCHEME]),
        reads=list[str],
        check=_check_scheme,
        default=None,
    )
    rules: Sequence[str] | None = option(
        "--rules NAME,...",
        f"For K and V. Default: {','.join(RULES)}.",
        reads=str,
        collect=lambda names: [name.strip() for name in names.split(",")],
        check=parse_rule,
        default=None,
    )
    kv_tokens: int = option(
        "--kv-tokens N", "Tokens of KV cache that count; 0: 16 bits.", least=0, default=8192
    )
    passes: int = option(
        "--passes N",
        "Most forward passes of the search.",
        least=2,
        default=128,
    )
    points: int = option(
        "--points N", "Other plans to measure on held-out text.", least=0, default=8
    )
    stats: shared.Stats | None = option(shared.STATS, default=None)
    out: str | Path | None = option(
        "--out DIR", "Output folder; default ./<model>-plan.", reads=Path, default=None
    )
    resume: bool = option(
        "--resume", "Take what an earlier run into this folder measured.", default=False
    )
    force: bool = option(shared.FORCE, default=False)
