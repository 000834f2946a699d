"""The request of `fp8calib export`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import FALLBACK, FORMATS, FP8_DTYPE, QUERY_SCALE, RULE, TP
from fp8calib.requests import shared


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """

    stats: Annotated[
        shared.Stats | Sequence[shared.Stats],
        Option(
            metavar="STATS...",
            reads=list[Path],
            check=shared.check_stats,
            help="stats.safetensors of a calibration, or its folder. Several are the shards of one "
            "run: they are joined, and stats.safetensors of the run is written too, or only that "
            "without --format.",
        ),
    ]
    out: Annotated[str | Path, Option("--out", metavar="DIR", reads=Path, help="Output folder.")]
    _: KW_ONLY
    recipe: Annotated[
        str | Path | None,
        Option(
            "--recipe",
            metavar="FILE",
            reads=str,
            help="A recipe whose rules and formats are used, such as that of `fp8calib plan`.",
        ),
    ] = None
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    tp: Annotated[int | Sequence[int] | None, TP] = None
    model: Annotated[
        shared.Model | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The calibrated model, or a quantized checkpoint of it (an overlay "
            "keeps its quantization); needed for overlays and weights.",
        ),
    ] = None
    base: shared.BaseOption = None
    other_weights: shared.OtherWeightsOption = False
    replace_scales: shared.ReplaceScalesOption = False
    rule: Annotated[str | None, RULE] = None
    fallback: Annotated[str | None, FALLBACK] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    query_scale: Annotated[str | None, QUERY_SCALE] = None
    with_weights: Annotated[
        bool,
        Option(
            "--with-weights",
            help="With --format rfc and --model: also write the FP8 weights of every rank. MODEL "
            "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
            "holds the compound scales.",
        ),
    ] = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None
