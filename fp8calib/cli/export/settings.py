"""The settings of `fp8calib export`: its options, not yet resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import (
    BaseOption,
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    OtherWeightsOption,
    QueryScaleOption,
    ReplaceScalesOption,
    RuleOption,
    TpOption,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSettings:
    """The command line."""

    stats: Annotated[
        Path, typer.Argument(metavar="STATS", help="stats.safetensors of a calibration.")
    ]
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder.")]
    formats: FormatOption = None
    tp: TpOption = None
    model: Annotated[
        str | None,
        typer.Option(
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
        typer.Option(
            "--with-weights",
            help="With --format rfc and --model: also write the FP8 weights of every rank. MODEL "
            "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
            "holds the compound scales.",
        ),
    ] = False
    force: ForceOption = False
    as_json: JsonOption = False
