"""Run `fp8calib quantize`: open the checkpoint, plan, write, print."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.console import Bar
from fp8calib.cli.quantize.output import find_finished, show_output, write_output
from fp8calib.cli.quantize.servable import require_servable
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.dialects.fp8.registry import find_written
from fp8calib.errors import UsageError
from fp8calib.fp8.schemes import GPTQ, NEAREST, Granularity, find_scheme, list_without_calibration
from fp8calib.machine.devices import choose_device
from fp8calib.quantization.calibrated_scales import check_stats_model, find_scales
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    PlanSettings,
    make_plan,
)
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.dequantized import DequantizedCheckpoint
from fp8calib.selection.select import Selection, select
from fp8calib.stats.calibration_stats import CalibrationStats, load_stats


def run_quantize(settings: QuantizeSettings) -> None:
    """Quantize a checkpoint and print the outcome.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        ExportError: the statistics do not fit, or the disk cannot hold the output.
    """
    asked = _resolve(settings)
    if settings.rounding == GPTQ:
        from fp8calib.cli.quantize.gptq import run_gptq  # noqa: PLC0415 -- imports transformers

        run_gptq(settings, asked)
        return
    device = torch.device("cpu" if settings.device == "auto" else choose_device(settings.device))
    stats = None if settings.stats is None else load_stats(settings.stats)
    reader = DequantizedCheckpoint if settings.dequantize else Checkpoint
    with reader.open(_find_folder(settings), require_config=True) as checkpoint:
        check_unquantized(checkpoint)
        selection = select(checkpoint, ignore=asked.ignore)
        scales = _find_scales(stats, checkpoint, asked, selection)
        plan = make_plan(checkpoint, asked, selection, scales=scales)
        if not settings.allow_unservable:
            require_servable(plan, checkpoint.folder)
        started = time.monotonic()
        written = find_finished(settings, plan)
        if written is None:
            with Bar() as bar:
                written = write_output(settings, checkpoint, plan, bar, device=device)
        show_output(
            settings, checkpoint, plan, written, started=started, stats=stats, notes=scales.notes
        )


def _resolve(settings: QuantizeSettings) -> PlanSettings:
    scheme = find_scheme(settings.scheme)
    dialect = find_written(settings.dialect, scheme)
    if settings.power_of_two_scales:
        if scheme.weights is not Granularity.BLOCK:
            raise UsageError(
                f"--power-of-two-scales: --scheme {scheme.name} has no scales of blocks",
                hint="leave it out: no engine rounds other scales",
            )
        scheme = replace(scheme, has_power_of_two_scales=True)
    _check_rounding(settings)
    if scheme.has_static_inputs and settings.stats is None and settings.rounding == NEAREST:
        raise UsageError(
            f"--scheme {scheme.name}: its input scales come from calibration",
            hint="pass the --stats of `fp8calib calibrate --recipe w8a8-static`, use --rounding "
            f"{GPTQ}, which measures them, or choose a scheme that needs no calibration: "
            f"{', '.join(list_without_calibration())}",
        )
    return PlanSettings(
        scheme=scheme,
        dialect=dialect,
        ignore=tuple(settings.ignore or ()),
        shares_scales=not settings.no_shared_scales,
    )


def _check_rounding(settings: QuantizeSettings) -> None:
    """Refuse an unknown rounding, and options that it has no use for."""
    if settings.rounding not in {NEAREST, GPTQ}:
        raise UsageError(f"--rounding {settings.rounding}: must be {NEAREST} or {GPTQ}")
    if settings.rounding == NEAREST and settings.text_options:
        raise UsageError(
            f"{settings.text_options[0]}: --rounding {NEAREST} runs no text",
            hint=f"leave it out, or use --rounding {GPTQ}",
        )
    if settings.rounding == GPTQ and settings.dequantize:
        raise UsageError(
            f"--dequantize: --rounding {GPTQ} needs an unquantized MODEL",
            hint="use the model that this one was made from",
        )


def _find_folder(settings: QuantizeSettings) -> Path:
    """Find the model's folder; for a local one, without the slow import of transformers.

    Raises:
        ModelError: the model is neither local nor on the Hub.
    """
    if Path(settings.model).is_dir():
        return Path(settings.model)
    from fp8calib.model.load import find_folder  # noqa: PLC0415

    return find_folder(settings.model, settings.revision)


def _find_scales(
    stats: CalibrationStats | None,
    checkpoint: Checkpoint,
    asked: PlanSettings,
    selection: Selection,
) -> CalibratedScales:
    if stats is None:
        return NO_SCALES
    check_stats_model(stats, checkpoint)
    return find_scales(stats, checkpoint, asked, selection)
