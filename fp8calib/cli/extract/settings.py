"""The settings of `fp8calib extract-kv-scales`: its options, not yet resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import (
    BaseOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    OtherWeightsOption,
    ReplaceScalesOption,
    RevisionOption,
    TrustOption,
)
from fp8calib.fp8.formats import KV_FORMATS


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtractSettings:
    """The command line."""

    quantized_model: Annotated[
        Path,
        typer.Option(
            "--quantized-model",
            metavar="PATH",
            help="Checkpoint folder or Hub id, or file (.safetensors .json .npz), with KV scales.",
        ),
    ]
    model: Annotated[
        str,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The unquantized model, or a quantized checkpoint of it (of which an overlay "
            "keeps the quantization): folder or Hub id.",
        ),
    ]
    save_path: Annotated[
        Path,
        typer.Option(
            "--save-path",
            "--out",
            metavar="DIR",
            help="Output folder: a checkpoint, or the folder of one file, by --format.",
        ),
    ]
    formats: FormatOption = None
    base: BaseOption = None
    other_weights: OtherWeightsOption = False
    replace_scales: ReplaceScalesOption = False
    source_dtype: Annotated[
        str | None,
        typer.Option(
            "--source-dtype",
            metavar="|".join(KV_FORMATS),
            help="FP8 format that the scales were made for, if the files do not state it.",
        ),
    ] = None
    fp8_dtype: Fp8DtypeOption = None
    tp: Annotated[
        list[int] | None,
        typer.Option(
            "--tp",
            metavar="N",
            help="Tensor-parallel degree of the JSON formats; repeat for more. Default: that of "
            "the source.",
        ),
    ] = None
    revision: RevisionOption = None
    trust_remote_code: TrustOption = False
    force: ForceOption = False
    as_json: JsonOption = False
