"""Run `fp8calib quantize`: plan, write, print."""

from __future__ import annotations

import time

from fp8calib.api.quantize.run import open_planned, resolve_plan
from fp8calib.cli.console import Bar, say
from fp8calib.cli.quantize.output import find_finished, show_output, write_output
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.errors import UsageError
from fp8calib.fp8.schemes import GPTQ, NEAREST
from fp8calib.stats.calibration_stats import load_stats


def run_quantize(settings: QuantizeSettings) -> None:
    """Quantize a checkpoint and print the outcome.

    Raises:
        UsageError: an option is invalid.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        ExportError: the statistics do not fit, or the disk cannot hold the output.
    """
    _check_rounding(settings)
    asked = resolve_plan(
        settings.scheme,
        settings.dialect,
        ignore=settings.ignore or (),
        power_of_two_scales=settings.power_of_two_scales,
        shared_scales=not settings.no_shared_scales,
        is_calibrated=settings.stats is not None or settings.rounding == GPTQ,
    )
    if settings.rounding == GPTQ:
        from fp8calib.cli.quantize.gptq import run_gptq  # noqa: PLC0415 -- imports transformers

        run_gptq(settings, asked)
        return
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
            say(planned.unchecked)
        started = time.monotonic()
        written = find_finished(settings, planned.plan)
        if written is None:
            with Bar() as bar:
                written = write_output(settings, planned, bar, device=settings.device)
        show_output(planned.finish(written, settings.out, started=started, stats=stats), settings)


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
