"""The request of `fp8calib export`, as it is asked: nothing is resolved yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.options.keys import FORMATS
from fp8calib.options.option import Option
from fp8calib.requests.shared import (
    BaseOption,
    FallbackOption,
    ForceOption,
    Fp8DtypeOption,
    Model,
    OtherWeightsOption,
    QueryScaleOption,
    ReplaceScalesOption,
    RuleOption,
    Stats,
    TokenizerArgument,
    TpOption,
)


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """

    stats: Annotated[
        Stats, Option(metavar="STATS", reads=Path, help="stats.safetensors of a calibration.")
    ]
    formats: Annotated[str | Sequence[str], FORMATS]
    out: Annotated[str | Path, Option("--out", metavar="DIR", reads=Path, help="Output folder.")]
    _: KW_ONLY
    tp: TpOption = None
    model: Annotated[
        Model | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            help="The calibrated model, or a quantized checkpoint of it (of which an overlay keeps "
            "the quantization); needed for overlays and weights.",
        ),
    ] = None
    base: BaseOption = None
    other_weights: OtherWeightsOption = False
    replace_scales: ReplaceScalesOption = False
    rule: RuleOption = None
    fallback: FallbackOption = None
    fp8_dtype: Fp8DtypeOption = None
    query_scale: QueryScaleOption = None
    with_weights: Annotated[
        bool,
        Option(
            "--with-weights",
            help="With --format rfc and --model: also write the FP8 weights of every rank. MODEL "
            "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
            "holds the compound scales.",
        ),
    ] = False
    force: ForceOption = False
    tokenizer: TokenizerArgument = None
