"""The request of `fp8calib auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.engines.registry import find_emulated, list_emulated_and_replayed
from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import BATCH_SIZE, DATA, PACK, SAMPLES, SEQ_LEN, TEXT_COLUMN
from fp8calib.requests import shared


@dataclass(frozen=True, slots=True)
class AutoRequest:
    """Choose how a model becomes FP8 from its own figures, write it, verify and check it.

    Exit code 0 only if what was written passes the gate when it is read back; else 8, or 9 where
    there is too little text to tell.

    Example: fp8calib auto HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl --engine vllm
    """

    model: Annotated[str | Path, shared.UNQUANTIZED]
    data: Annotated[str | Path | Sequence[str | Path] | None, DATA] = None
    _: KW_ONLY
    text_column: Annotated[str | None, TEXT_COLUMN] = None
    gate: Annotated[
        str,
        Option(
            "--gate",
            metavar="w8a8|kv",
            check=shared.check_gate,
            help="What becomes FP8, and the gate that it has to pass: weights, inputs and KV cache "
            "(w8a8), or the KV cache alone (kv).",
        ),
    ] = "w8a8"
    engine: Annotated[
        str,
        Option(
            "--engine",
            metavar="NAME[==VERSION]",
            check=find_emulated,
            help=f"The engine that has to serve it: {', '.join(list_emulated_and_replayed())}.",
        ),
    ] = "vllm"
    mxfp8: Annotated[
        bool,
        Option(
            "--mxfp8",
            help="Consider mxfp8 among the schemes, if the engine loads it. Only Blackwell, MI350 "
            "and MI355 multiply it.",
        ),
    ] = False
    gpu: shared.GpuOption = None
    out: Annotated[
        str | Path | None,
        Option("--out", metavar="DIR", reads=Path, help="Output folder; default ./<model>-fp8."),
    ] = None
    receipt: shared.ReceiptOption = None
    samples: Annotated[int, SAMPLES] = SAMPLES.default
    seq_len: Annotated[int | None, SEQ_LEN] = None
    batch_size: Annotated[int, BATCH_SIZE] = BATCH_SIZE.default
    pack: Annotated[bool, PACK] = True
    device: shared.DeviceOption = "auto"
    dtype: shared.DtypeOption = "auto"
    device_map: shared.DeviceMapOption = None
    memory: shared.MemoryOption = None
    revision: shared.RevisionOption = None
    trust_remote_code: shared.TrustOption = False
    dry_run: shared.DryRunOption = False
    resume: Annotated[
        bool, Option("--resume", help="Continue an interrupted run from its statistics.")
    ] = False
    force: shared.ForceOption = False
    progress: shared.ProgressArgument = None
