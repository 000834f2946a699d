"""The options of `fp8calib verify`; heavy libraries are imported after they are parsed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import (
    BatchSizeOption,
    DataOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    JsonOption,
    MemoryOption,
    NoPackOption,
    RevisionOption,
    SamplesOption,
    SeqLenOption,
    TrustOption,
    UnquantizedModel,
)
from fp8calib.engines.registry import list_emulated
from fp8calib.fp8.schemes import SCHEMES


def verify_command(
    model: UnquantizedModel,
    scales: Annotated[
        list[str] | None,
        typer.Option(
            "--scales",
            metavar="PATH",
            help="Statistics, a file of scales, or an FP8 checkpoint; repeat to compare several.",
        ),
    ] = None,
    data: DataOption = None,
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME",
            help=f"Engine to emulate: {', '.join(list_emulated())}.",
        ),
    ] = "vllm",
    scheme: Annotated[
        str | None,
        typer.Option(
            "--scheme",
            metavar="NAME",
            help="Emulate FP8 weights and inputs instead of an FP8 KV cache: "
            f"{', '.join(SCHEMES)}.",
        ),
    ] = None,
    rules: Annotated[
        str | None,
        typer.Option(
            "--rules",
            metavar="NAME,...",
            help="Scale rules to compare, such as amax,percentile:99.99,mse,headroom:2.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also quantize one layer at a time.")
    ] = False,
    fp8_dtype: Annotated[
        str,
        typer.Option(
            "--fp8-dtype",
            metavar="NAME",
            help="FP8 format for statistics and scale 1.0: e4m3fn, e4m3fnuz or e5m2.",
        ),
    ] = "e4m3fn",
    samples: SamplesOption = None,
    seq_len: SeqLenOption = None,
    batch_size: BatchSizeOption = None,
    no_pack: NoPackOption = False,
    gate: Annotated[
        str | None,
        typer.Option(
            "--gate",
            metavar="NAME|FILE",
            help="Thresholds: kv, w8a8 or a YAML file. Exit code 8 if a --scales candidate fails.",
        ),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option("--report", metavar="FILE.html", help="Write an HTML page with plots."),
    ] = None,
    dump: Annotated[
        Path | None,
        typer.Option(
            "--dump", metavar="FILE", help="Write every token's log-probability (safetensors)."
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            "--tasks",
            metavar="NAME,...",
            help="Also run these tasks of lm-evaluation-harness; a task may be a YAML file.",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", metavar="N", min=1, help="Run only the first N documents of each task."
        ),
    ] = None,
    device: DeviceOption = "auto",
    dtype: DtypeOption = "auto",
    device_map: DeviceMapOption = None,
    memory: MemoryOption = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan and exit: run nothing.")
    ] = False,
    revision: RevisionOption = None,
    trust_remote_code: TrustOption = False,
    as_json: JsonOption = False,
) -> int:
    """Compare a model with its FP8 emulation on the same text.

    Example: fp8calib verify SmolLM2-135M-Instruct --scales SmolLM2-135M-Instruct-fp8calib
    """
    with heavy_imports():
        from fp8calib.cli.verify.job import VerifySettings  # noqa: PLC0415
        from fp8calib.cli.verify.run import run_verify  # noqa: PLC0415

    return run_verify(
        VerifySettings(
            model=model,
            scales=tuple(scales or ()),
            data=tuple(data or ()),
            engine=engine,
            scheme=scheme,
            rules=() if rules is None else tuple(rule.strip() for rule in rules.split(",")),
            sensitivity=sensitivity,
            fp8_dtype=fp8_dtype,
            samples=512 if samples is None else samples,
            seq_len=seq_len,
            batch_size=1 if batch_size is None else batch_size,
            pack=not no_pack,
            gate=gate,
            report=report,
            dump=dump,
            tasks=() if tasks is None else tuple(task.strip() for task in tasks.split(",")),
            limit=limit,
            device=device,
            dtype=dtype,
            device_map=device_map,
            memory=memory,
            dry_run=dry_run,
            revision=revision,
            trust_remote_code=trust_remote_code,
            as_json=as_json,
        )
    )
