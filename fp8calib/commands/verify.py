"""The request of `fp8calib verify`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from fp8calib.checkpoint.locations import require_path
from fp8calib.commands import options as shared
from fp8calib.commands.option import Option
from fp8calib.commands.options import TextOptions
from fp8calib.errors import UsageError
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS
from fp8calib.numerics.rules import parse_rule
from fp8calib.numerics.schemes import SCHEMES, find_scheme


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(","))


def _check_rule(name: str) -> None:
    if name:  # the command refuses an empty one
        parse_rule(name)


def _split_layers(names: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _split(names))
    except ValueError:
        raise UsageError(
            f"{shared.SKIP_LAYERS} {names}: not a list of layers", hint="such as 0,29, from 0"
        ) from None


def check_scales(path: str) -> None:
    """Refuse a path that does not exist."""
    require_path(Path(path), option="--scales")


@dataclass(frozen=True)
class VerifyRequest(TextOptions):
    """Compare a model with its FP8 emulation on the same text.

    Example: fp8calib verify SmolLM2-135M-Instruct --scales SmolLM2-135M-Instruct-fp8calib
    """

    if_quantized: ClassVar[str] = (
        "pass the model it was made from as MODEL, and this one as --scales {}"
    )
    scales: Annotated[
        shared.Stats | Iterable[shared.Stats],
        Option(
            "--scales",
            metavar="PATH",
            reads=list[str],
            check=check_scales,
            help="Statistics, scales or an FP8 checkpoint; repeat to compare several.",
        ),
    ] = ()
    data: shared.DataOption = None
    _: KW_ONLY
    engine: shared.EngineOption = "vllm"
    scheme: Annotated[
        str | None,
        Option(
            "--scheme",
            metavar="|".join(SCHEMES),
            check=find_scheme,
            help="Emulate FP8 weights and inputs instead of an FP8 KV cache.",
        ),
    ] = None
    rules: Annotated[
        Sequence[str] | None,
        Option(
            "--rules",
            metavar="NAME,...",
            reads=str,
            collect=_split,
            check=_check_rule,
            help="Rules to compare, such as amax,percentile:99.99,mse,headroom:2.",
        ),
    ] = None
    kv_cache_dtype_skip_layers: Annotated[
        Sequence[int] | None,
        Option(
            shared.SKIP_LAYERS,
            metavar="N,...",
            reads=str,
            collect=_split_layers,
            help="Layers whose KV cache stays in 16 bits.",
        ),
    ] = None
    fp8_dtype: Annotated[
        str,
        Option(
            "--fp8-dtype",
            choices=tuple(FP8_FORMATS),
            help="FP8 format for statistics and scale 1.0.",
        ),
    ] = E4M3FN.name
    gate: Annotated[
        str | None,
        Option(
            "--gate",
            metavar="kv|w8a8|FILE",
            check=shared.check_gate,
            help="Thresholds (FILE is YAML); exit code 8 if a candidate fails.",
        ),
    ] = None
    strict: Annotated[bool, Option("--strict", help="With --gate, a warning exits with 8 too.")] = (
        False
    )
    report: Annotated[
        str | Path | None,
        Option("--report", metavar="FILE.html", reads=Path, help="Write an HTML page with charts."),
    ] = None
    dump: Annotated[
        str | Path | None,
        Option(
            "--dump",
            metavar="FILE",
            reads=Path,
            help="Write every token's log-probability (safetensors).",
        ),
    ] = None
    force: Annotated[bool, Option("--force", help="Replace the files of --report and --dump.")] = (
        False
    )
    everything: Annotated[
        bool, Option("--all", help="Print every table, not only what is lost.", is_layout=True)
    ] = False
    device_map: shared.DeviceMapOption = None
    tokenizer: shared.TokenizerArgument = None
