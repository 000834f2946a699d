"""Run `fp8calib quantize`: plan, write, print."""

from __future__ import annotations

import time

from fp8calib.cli.console import Bar, prints_json, say, warn
from fp8calib.cli.quantization_report import show_quantization_report
from fp8calib.fp8.schemes import GPTQ
from fp8calib.jobs.quantization.planned import (
    check_rounding,
    find_finished,
    open_planned,
    resolve_plan,
    write_planned,
)
from fp8calib.jobs.quantization.report import QuantizationOutcome, build_quantization_report
from fp8calib.machine.units import format_gib
from fp8calib.quantization.plan import PlanSettings
from fp8calib.quantization.quantize import count_pinned_bytes
from fp8calib.requests.quantize import QuantizeRequest
from fp8calib.stats.calibration_stats import load_stats


def run_quantize(settings: QuantizeRequest) -> None:
    """Quantize a checkpoint and print the outcome.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        ExportError: the statistics do not fit, or the disk cannot hold the output.
    """
    check_rounding(settings.rounding, settings.text_options, dequantize=settings.dequantize)
    asked = resolve_plan(
        settings.scheme,
        settings.dialect,
        layer_schemes=settings.layer_schemes,
        ignore=settings.ignore or (),
        power_of_two_scales=settings.power_of_two_scales,
        shared_scales=not settings.no_shared_scales,
        is_calibrated=settings.stats is not None or settings.rounding == GPTQ,
        rounding=settings.rounding,
    )
    if settings.rounding == GPTQ:
        from fp8calib.cli.quantize.gptq import round_by_gptq  # noqa: PLC0415 -- imports transformers

        outcome = round_by_gptq(settings, asked)
    else:
        outcome = _round_to_nearest(settings, asked)
    if outcome is not None:
        show_quantization_report(build_quantization_report(outcome), as_json=prints_json())


def _round_to_nearest(settings: QuantizeRequest, asked: PlanSettings) -> QuantizationOutcome:
    stats = None if settings.stats is None else load_stats(settings.stats)
    with open_planned(
        settings.model,
        asked,
        stats,
        revision=settings.revision,
        dequantize=settings.dequantize,
        allow_unservable=settings.allow_unservable,
    ) as planned:
        if planned.unchecked:
            warn(planned.unchecked)
        started = time.monotonic()
        if settings.resume and find_finished(settings.out, planned.plan) is not None:
            say(f"{settings.out} is finished already")
        if settings.device not in ("auto", "cpu"):
            size = format_gib(count_pinned_bytes())
            say(f"weights are copied to the GPU through pinned buffers of {size}")
        with Bar() as bar:
            written = write_planned(
                planned,
                settings.out,
                device=settings.device,
                resume=settings.resume,
                force=settings.force,
                inputs=[] if settings.stats is None else [settings.stats],
                progress=bar,
            )
        return planned.finish(written, settings.out, started=started, stats=stats)
