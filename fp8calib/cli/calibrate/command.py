"""The options of `fp8calib calibrate`; heavy libraries are imported after they are parsed."""

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
    QueryScaleOption,
    RevisionOption,
    RuleOption,
    SamplesOption,
    SeqLenOption,
    TpOption,
    TrustOption,
    UnquantizedModel,
    split_names,
)


def calibrate_command(
    model: UnquantizedModel,
    data: DataOption = None,
    recipe: Annotated[
        str,
        typer.Option(
            "--recipe",
            metavar="NAME|FILE",
            help="What to observe and write; see `fp8calib recipes`.",
        ),
    ] = "kv",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Output folder; default ./<model>-fp8calib."),
    ] = None,
    formats: FormatOption = None,
    tp: TpOption = None,
    samples: SamplesOption = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    no_pack: NoPackOption = False,
    seed: Annotated[
        int | None,
        typer.Option("--seed", metavar="S", help="Seed for mixing weighted data specs."),
    ] = None,
    rule: RuleOption = None,
    fallback: FallbackOption = None,
    fp8_dtype: Fp8DtypeOption = None,
    query_scale: QueryScaleOption = False,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: DeviceMapOption = None,
    memory: MemoryOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and exit: run and write nothing.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted or killed run.")
    ] = False,
    shard: Annotated[
        str | None,
        typer.Option(
            "--shard",
            metavar="I/N",
            help="Run only part I of N (from 1); `fp8calib merge` joins the statistics.",
        ),
    ] = None,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run calibration text through an unquantized model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """
    with heavy_imports():
        from fp8calib.cli.calibrate.job import CalibrateSettings  # noqa: PLC0415
        from fp8calib.cli.calibrate.processes import leave_out_formats  # noqa: PLC0415
        from fp8calib.cli.calibrate.run import run_calibrate  # noqa: PLC0415
        from fp8calib.cli.recipe_options import override_recipe  # noqa: PLC0415
        from fp8calib.data.shares import parse_share  # noqa: PLC0415

    data_options = {
        "sources": data,
        "samples": samples,
        "seq_len": seq_len,
        "batch_size": batch_size,
        "pack": False if no_pack else None,
        "seed": seed,
    }
    resolved = override_recipe(
        recipe,
        data=data_options,
        scales={"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype},
        top={
            "formats": split_names(formats),
            "tp": tp,
            "query_scale": query_scale or None,
        },
    )
    if not resolved.observe.needs_forward and any(v is not None for v in data_options.values()):
        warn(f"recipe {resolved.name} runs no data: --data and related options have no effect")
    if shard is not None:
        if formats:
            warn("--format has no effect on a shard: run `fp8calib export` after `fp8calib merge`")
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
