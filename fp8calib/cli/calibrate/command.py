"""`fp8calib calibrate`: the options, and nothing heavy before they are parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.console import warn
from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import (
    BatchSizeOption,
    DataOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    FallbackOption,
    ForceOption,
    FormatOption,
    Fp8DtypeOption,
    JsonOption,
    MemoryOption,
    NoPackOption,
    RevisionOption,
    RuleOption,
    SamplesOption,
    SeqLenOption,
    TpOption,
    TrustOption,
    split_names,
)


def calibrate_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder or hub id.")],
    data: DataOption = None,
    recipe: Annotated[
        str, typer.Option("--recipe", metavar="NAME|FILE", help="See `fp8calib recipes`.")
    ] = "kv",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Default: ./<model>-fp8calib."),
    ] = None,
    formats: FormatOption = None,
    tp: TpOption = None,
    samples: SamplesOption = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    no_pack: NoPackOption = False,
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
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: DeviceMapOption = None,
    memory: MemoryOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan; run and write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on where an interrupted or killed run stopped.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Run part I (from 1) of N; `fp8calib merge` joins what all parts wrote.",
        ),
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run calibration text through an unquantized model and write FP8 scales engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """
    with heavy_imports():
        from fp8calib.cli.calibrate.job import CalibrateSettings  # noqa: PLC0415
        from fp8calib.cli.calibrate.processes import leave_out_formats  # noqa: PLC0415
        from fp8calib.cli.calibrate.run import run_calibrate  # noqa: PLC0415
        from fp8calib.cli.recipe_options import override_recipe  # noqa: PLC0415
        from fp8calib.data.shares import parse_share  # noqa: PLC0415

    asked_of_data = {
        "sources": data,
        "samples": samples,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "pack": False if no_pack else None,
        "seed": seed,
    }
    resolved = override_recipe(
        recipe,
        data=asked_of_data,
        scales={"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype},
        top={
            "formats": split_names(formats),
            "tp": tp,
            "query_scale": query_scale or None,
        },
    )
    if not resolved.observe.needs_forward and any(v is not None for v in asked_of_data.values()):
        warn(f"recipe {resolved.name} runs no data: --data and what goes with it change nothing")
    if shard is not None:
        if formats:
            warn("--format: a shard writes no scales; `fp8calib export` does, after the merge")
        resolved = leave_out_formats(resolved)
    run_calibrate(
        CalibrateSettings(
            model=model,
            recipe=resolved,
            out=out,
            device=device,
            dtype=dtype,
            device_map=device_map,
            memory=memory,
            resume=resume,
            shard=None if shard is None else parse_share(shard),
            revision=revision,
            trust_remote_code=trust_remote_code,
            force=force,
            dry_run=dry_run,
            as_json=as_json,
        )
    )
