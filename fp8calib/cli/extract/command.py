"""The options of `fp8calib extract-kv-scales`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import (
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    RevisionOption,
    TrustOption,
    split_names,
)


def extract_command(
    quantized_model: Annotated[
        Path,
        typer.Option(
            "--quantized-model",
            metavar="PATH",
            help="Checkpoint folder, or file (.safetensors .json .npz), with KV scales.",
        ),
    ],
    model: Annotated[
        str,
        typer.Option("--model", metavar="MODEL", help="The unquantized model: folder or Hub id."),
    ],
    save_path: Annotated[
        Path,
        typer.Option(
            "--save-path",
            metavar="DIR",
            help="Output folder: a checkpoint, or the folder of one file, by --format.",
        ),
    ],
    formats: FormatOption = None,
    source_dtype: Annotated[
        str | None,
        typer.Option(
            "--source-dtype",
            metavar="NAME",
            help="FP8 format that the scales were made for, if the files do not state it: "
            "e4m3fn or e4m3fnuz.",
        ),
    ] = None,
    fp8_dtype: Fp8DtypeOption = None,
    tp: Annotated[
        int | None,
        typer.Option(
            "--tp",
            metavar="N",
            help="Tensor-parallel degree of the JSON formats; default: that of the source.",
        ),
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Copy the KV scales of a quantized checkpoint to its unquantized model.

    Example: fp8calib extract-kv-scales --quantized-model llama-fp8 --model llama --save-path out
    """
    with heavy_imports():
        from fp8calib.cli.extract.run import ExtractSettings, run_extract  # noqa: PLC0415
        from fp8calib.errors import UsageError  # noqa: PLC0415

    names = split_names(formats) or ["kv-overlay"]
    if len(names) > 1:
        raise UsageError(
            f"--format {' '.join(names)}: only one format can be written to --save-path",
            hint="run the command once for each format",
        )
    run_extract(
        ExtractSettings(
            quantized_model=quantized_model,
            model=model,
            save_path=save_path,
            format_name=names[0],
            source_dtype=source_dtype,
            fp8_dtype=fp8_dtype or "e4m3fn",
            tp=tp,
            revision=revision,
            trust_remote_code=trust_remote_code,
            force=force,
            as_json=as_json,
        )
    )
