"""The request of `fp8calib card`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model, require_path
from fp8calib.options.option import Option
from fp8calib.requests import shared


@dataclass(frozen=True, slots=True)
class CardRequest:
    """Write a model card into a folder: figures of loss, engines, commands and hashes.

    Example: fp8calib card llama-fp8/fp8-dynamic --base-model meta-llama/Llama-3.1-8B-Instruct
    """

    folder: Annotated[
        str | Path,
        Option(
            metavar="DIR",
            reads=Path,
            help="An FP8 checkpoint, an overlay, or a folder of files of KV scales.",
        ),
    ]
    _: KW_ONLY
    verify_reports: Annotated[
        Sequence[str | Path] | None,
        Option(
            "--verify-report",
            metavar="JSON",
            reads=list[Path],
            help="What `verify --json` printed about DIR; repeat for more.",
        ),
    ] = None
    base_model: Annotated[
        str | None,
        Option(
            "--base-model",
            metavar="ORG/NAME",
            help="Hub id of the unquantized model; default: the one in a report.",
        ),
    ] = None
    repo: Annotated[
        str | None,
        Option(
            "--repo", metavar="ORG/NAME", help="Hub id that DIR is published under, for commands."
        ),
    ] = None
    quantized_by: Annotated[
        str | None,
        Option("--quantized-by", metavar="NAME", help="Who made it, for the front matter."),
    ] = None
    model: Annotated[
        str | Path | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The unquantized model, whose layers are checked; files of scales need it.",
        ),
    ] = None
    receipt: Annotated[
        str | Path | None,
        Option(
            "--receipt",
            metavar="FILE.json",
            reads=Path,
            check=partial(require_path, option="--receipt"),
            help="A receipt of DIR, which is copied there with its badge, and shown in the card.",
        ),
    ] = None
    vllm_recipe: Annotated[
        str | Path | None,
        Option(
            "--vllm-recipe",
            metavar="FILE.yaml",
            reads=Path,
            help="Write the entry of vLLM's collection of recipes: the model, with DIR as a "
            "variant.",
        ),
    ] = None
    sglang_cookbook: Annotated[
        str | Path | None,
        Option(
            "--sglang-cookbook",
            metavar="FILE.yaml",
            reads=Path,
            help="Write the entry of SGLang's cookbook for DIR.",
        ),
    ] = None
    push: shared.PushOption = None
    upload: shared.UploadOption = False
    force: Annotated[
        bool, Option("--force", help="Replace DIR/README.md, the receipt there, and entries.")
    ] = False
