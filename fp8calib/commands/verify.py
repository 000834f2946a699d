"""The request of `fp8calib verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any, ClassVar

from fp8calib.checkpoint.locations import require_path
from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class
from fp8calib.errors import UsageError
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS
from fp8calib.numerics.rules import parse_rule
from fp8calib.numerics.schemes import SCHEMES, find_scheme


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(","))


def _split_layers(names: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, _split(names)))
    except ValueError:
        raise UsageError(
            f"{shared.SKIP_LAYERS} {names}: not a list of layers", hint="such as 0,29, from 0"
        ) from None


def require_scales(path: str) -> None:
    """Refuse a path that does not exist."""
    require_path(Path(path), option="--scales", hint="calibrate and quantize write such")


@request_class
class VerifyRequest(shared.TextOptions):
    """Compare a model with its FP8 emulation on the same text.

    Example: fp8calib verify SmolLM2-135M-Instruct --scales SmolLM2-135M-Instruct-fp8calib
    """

    if_quantized: ClassVar[str] = (
        "`fp8calib verify MODEL --scales {}` compares it with the model it was made from"
    )
    scales: shared.Stats | Iterable[shared.Stats] = option(
        "--scales PATH",
        "Statistics, scales or FP8 checkpoint; repeat for more.",
        reads=list[str],
        check=require_scales,
        default=(),
    )
    data: shared.TextData | None = option(shared.DATA, default=None)
    _: KW_ONLY
    engine: str = option(shared.ENGINE, default="vllm")
    scheme: str | None = option(
        "--scheme",
        "Emulate FP8 weights and inputs instead of an FP8 KV cache.",
        metavar="|".join(SCHEMES),
        check=find_scheme,
        default=None,
    )
    rules: Sequence[str] | None = option(
        "--rules NAME,...",
        "KV rules to try: amax,percentile:99.99,mse,headroom:2.",
        reads=str,
        collect=_split,
        check=parse_rule,
        default=None,
    )
    kv_cache_dtype_skip_layers: Sequence[int] | None = option(
        f"{shared.SKIP_LAYERS} N,...",
        "Layers whose KV cache stays in 16 bits.",
        reads=str,
        collect=_split_layers,
        default=None,
    )
    fp8_dtype: str = option(
        "--fp8-dtype",
        "FP8 format for statistics and scale 1.0.",
        choices=tuple(FP8_FORMATS),
        default=E4M3FN.name,
    )
    gate: str | None = option(
        "--gate kv|w8a8|FILE",
        "Thresholds (YAML); exit code 8 if a candidate fails.",
        check=shared.check_gate,
        default=None,
    )
    strict: bool = option("--strict", "With --gate, a warning exits with 8 too.", default=False)
    report: str | Path | None = option(
        "--report FILE.html", "Write an HTML page with charts.", reads=Path, default=None
    )
    dump: str | Path | None = option(
        "--dump FILE",
        "Write every token's log-probability (safetensors).",
        reads=Path,
        default=None,
    )
    force: bool = option("--force", "Replace the files of --report and --dump.", default=False)
    everything: bool = option("--all", "Print every table, not only what is lost.", default=False)
    device_map: str | None = option(shared.DEVICE_MAP, default=None)
    tokenizer: Any = option(shared.TOKENIZER, default=None)
