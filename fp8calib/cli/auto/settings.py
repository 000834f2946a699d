"""The settings of `fp8calib auto`: its options, not yet resolved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import (
    BATCH_SIZE,
    SAMPLES,
    DataOption,
    DeviceMapOption,
    DeviceOption,
    DtypeOption,
    ForceOption,
    JsonOption,
    MemoryOption,
    NoPackOption,
    RevisionOption,
    SeqLenOption,
    TextColumnOption,
    TrustOption,
    UnquantizedModel,
)
from fp8calib.engines.registry import list_emulated_and_replayed


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """The command line."""

    model: UnquantizedModel
    data: DataOption = None
    text_column: TextColumnOption = None
    gate: Annotated[
        str,
        typer.Option(
            "--gate",
            metavar="w8a8|kv",
            help="What becomes FP8, and the gate that it has to pass: weights, inputs and KV cache "
            "(w8a8), or the KV cache alone (kv).",
        ),
    ] = "w8a8"
    engine: Annotated[
        str,
        typer.Option(
            "--engine",
            metavar="NAME[==VERSION]",
            help=f"The engine that has to serve it: {', '.join(list_emulated_and_replayed())}.",
        ),
    ] = "vllm"
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Output folder; default ./<model>-fp8."),
    ] = None
    samples: Annotated[int, SAMPLES] = 512
    seq_len: SeqLenOption = None
    batch_size: Annotated[int, BATCH_SIZE] = 1
    no_pack: NoPackOption = False
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    device_map: DeviceMapOption = None
    memory: MemoryOption = None
    revision: RevisionOption = None
    trust_remote_code: TrustOption = False
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the plan; run and write nothing.")
    ] = False
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue an interrupted run from its statistics.")
    ] = False
    force: ForceOption = False
    as_json: JsonOption = False
