"""`fp8calib calibrate`: the options, and nothing heavy before they are parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.arguments import (
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    RevisionOption,
    RuleOption,
    TpOption,
    TrustOption,
    split_names,
)
from fp8calib.cli.heavy_imports import heavy_imports


def calibrate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="SPEC",
            help="File (.jsonl .json .parquet .txt), folder, hub:NAME[:CONFIG][:SPLIT] or builtin; "
            "SPEC@WEIGHT mixes several. Default: builtin.",
        ),
    ] = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="See `fp8calib recipes`.")
    ] = "kv",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Default: ./<model>-fp8calib."),
    ] = None,
    formats: FormatOption = None,
    tp: TpOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", metavar="N", min=1, help="Sequences; default 512.")
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len", metavar="L", min=2, help="Tokens each; default min(2048, the model's)."
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        typer.Option("--batch-size", metavar="B", min=1, help="Sequences at once; default 1."),
    ] = None,
    no_pack: Annotated[
        bool, typer.Option("--no-pack", help="Keep rows whole: cut, padded, the padding masked.")
    ] = False,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", help="Orders the mixing of weighted specs."),
    ] = None,
    rule: RuleOption = None,
    fallback: FallbackOption = None,
    fp8_dtype: Fp8DtypeOption = None,
    query_scale: Annotated[
        bool, typer.Option("--query-scale", help="Write q_scale into overlays.")
    ] = False,
    device: Annotated[
        str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", help="Where to run.")
    ] = "auto",
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype", metavar="auto|float32|bfloat16|float16", help="What to compute in."
        ),
    ] = "auto",
    device_map: Annotated[
        str | None,
        typer.Option("--device-map", metavar="auto", help="Spread the model over all GPUs."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; load no weights, write nothing.")
    ] = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run calibration text through an unquantized model and write FP8 scales engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """
    with heavy_imports():
        from fp8calib.cli.calibrate_job import Settings  # noqa: PLC0415
        from fp8calib.cli.calibrate_run import run_calibrate  # noqa: PLC0415
        from fp8calib.cli.options import override_recipe  # noqa: PLC0415

    resolved = override_recipe(
        recipe,
        data={
            "sources": data,
            "samples": samples,
            "seq_len": seq_len,
            "batch_size": batch_size,
            "pack": False if no_pack else None,
            "seed": seed,
        },
        scales={"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype},
        top={
            "formats": split_names(formats),
            "tp": tp,
            "query_scale": query_scale or None,
        },
    )
    run_calibrate(
        Settings(
            model=model,
            recipe=resolved,
            out=out,
            device=device,
            dtype=dtype,
            device_map=device_map,
            revision=revision,
            trust_remote_code=trust_remote_code,
            force=force,
            dry_run=dry_run,
            as_json=as_json,
        )
    )
