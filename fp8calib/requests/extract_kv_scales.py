"""The request of `fp8calib extract-kv-scales`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.numerics.formats import KV_FORMATS
from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import FORMATS, FP8_DTYPE
from fp8calib.requests import shared


@dataclass(frozen=True, slots=True)
class ExtractRequest:
    """Copy the KV scales of a quantized checkpoint to its unquantized model.

    Example: fp8calib extract-kv-scales --quantized-model llama-fp8 --model llama --save-path out
    """

    quantized_model: Annotated[
        str | Path,
        Option(
            "--quantized-model",
            metavar="PATH",
            reads=Path,
            check=shared.require_input("name a checkpoint folder or a file of scales"),
            help="Checkpoint folder or Hub id, or file (.safetensors .json .npz), with KV scales.",
        ),
    ]
    model: Annotated[
        str | Path,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The unquantized model, or a quantized checkpoint of it (an overlay keeps "
            "its quantization): folder or Hub id.",
        ),
    ]
    save_path: Annotated[
        str | Path,
        Option(
            "--save-path --out",
            metavar="DIR",
            reads=Path,
            help="Output folder: a checkpoint, or the folder of one file, by --format.",
        ),
    ]
    _: KW_ONLY
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    base: shared.BaseOption = None
    other_weights: shared.OtherWeightsOption = False
    replace_scales: shared.ReplaceScalesOption = False
    source_dtype: Annotated[
        str | None,
        Option(
            "--source-dtype",
            choices=tuple(KV_FORMATS),
            help="FP8 format that the scales were made for, if the files do not state it.",
        ),
    ] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    tp: Annotated[
        list[int] | None,
        Option(
            "--tp",
            metavar="N",
            help="Tensor-parallel degree of the JSON formats; repeat for more. Default: that of "
            "the source.",
        ),
    ] = None
    revision: shared.RevisionOption = None
    trust_remote_code: shared.TrustOption = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False
