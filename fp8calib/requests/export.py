"""The request of `fp8calib export`, as it is asked: nothing is resolved yet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.options.option import Option
from fp8calib.requests.shared import (
    BaseOption,
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    OtherWeightsOption,
    QueryScaleOption,
    ReplaceScalesOption,
    RuleOption,
    TpOption,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """

    stats: Annotated[Path, Option(metavar="STATS", help="stats.safetensors of a calibration.")]
    out: Annotated[Path, Option("--out", metavar="DIR", help="Output folder.")]
    formats: FormatOption = None
    tp: TpOption = None
    model: Annotated[
        str | None,
        Option(
            "--model",
            metavar="MODEL",
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
