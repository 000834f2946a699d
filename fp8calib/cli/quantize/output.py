"""Write the checkpoint of `fp8calib quantize` and print the report."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.resumable_folder import remove_progress_file
from fp8calib.cli.console import Bar, say
from fp8calib.cli.quantization_report import (
    QuantizationOutcome,
    build_quantization_report,
    show_quantization_report,
)
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.quantize import Written, is_finished, list_files, quantize
from fp8calib.quantization.rounded_codes import RoundedCodes, RoundedLinear
from fp8calib.stats.calibration_stats import CalibrationStats


def find_finished(settings: QuantizeSettings, plan: QuantizePlan) -> Written | None:
    """With --resume, look for a checkpoint that an earlier run finished."""
    if not settings.resume or not is_finished(settings.out, plan):
        return None
    remove_progress_file(settings.out)
    say(f"{settings.out} is finished already")
    return Written(files=list_files(settings.out), all_zero=(), resumed=())


def write_output(
    settings: QuantizeSettings,
    checkpoint: Checkpoint,
    plan: QuantizePlan,
    bar: Bar,
    *,
    device: torch.device,
    rounded: RoundedCodes | None = None,
) -> Written:
    """Write the planned checkpoint; codes in `rounded` are not computed again.

    Raises:
        ExportError: the disk cannot hold the output.
    """
    bar.stage("quantizing", sum(shard.data_bytes for shard in plan.shards), unit="bytes")
    return quantize(
        checkpoint,
        plan,
        settings.out,
        device=device,
        advance=bar.advance,
        resume=settings.resume,
        force=settings.force,
        inputs=[] if settings.stats is None else [settings.stats],
        rounded=rounded,
    )


def show_output(
    settings: QuantizeSettings,
    checkpoint: Checkpoint,
    plan: QuantizePlan,
    written: Written,
    *,
    started: float,
    stats: CalibrationStats | None,
    notes: tuple[str, ...] = (),
    rounded: Sequence[RoundedLinear] = (),
) -> None:
    """Print the report; `started` is the value of time.monotonic() at the start."""
    outcome = QuantizationOutcome(
        plan=plan,
        written=written,
        folder=settings.out,
        out=settings.out,
        source_bytes=checkpoint.total_size_bytes,
        duration_s=time.monotonic() - started,
        stats=stats,
        notes=notes,
        rounded=rounded,
    )
    show_quantization_report(build_quantization_report(outcome), as_json=settings.as_json)
