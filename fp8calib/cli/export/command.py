"""The options of `fp8calib export`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import (
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    QueryScaleOption,
    RuleOption,
    TpOption,
    split_names,
)
from fp8calib.dialects.registry import list_format_names


def export_command(
    stats: Annotated[
        Path, typer.Argument(metavar="STATS", help="stats.safetensors of a calibration.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Output folder.")],
    formats: FormatOption = None,
    tp: TpOption = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="MODEL",
            help="The unquantized model; needed for overlays and weights.",
        ),
    ] = None,
    rule: RuleOption = None,
    fallback: FallbackOption = None,
    fp8_dtype: Fp8DtypeOption = None,
    query_scale: QueryScaleOption = False,
    with_weights: Annotated[
        bool,
        typer.Option(
            "--with-weights",
            help="With --format rfc and --model: also write the FP8 weights of every rank. MODEL "
            "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
            "holds the compound scales.",
        ),
    ] = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """
    with heavy_imports():
        from fp8calib.cli.export.run import ExportSettings, run_export  # noqa: PLC0415
        from fp8calib.cli.recipe_options import override_recipe  # noqa: PLC0415
        from fp8calib.errors import UsageError  # noqa: PLC0415

    names = split_names(formats)
    if not names:
        raise UsageError(
            "export: --format is missing",
            hint=f"known formats: {', '.join(list_format_names())}",
        )
    resolved = override_recipe(
        "kv",
        data={},
        scales={"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype},
        top={"formats": names, "tp": tp, "query_scale": query_scale},
    )
    run_export(
        ExportSettings(
            stats=stats,
            out=out,
            recipe=resolved,
            model=model,
            with_weights=with_weights,
            force=force,
            as_json=as_json,
        )
    )
