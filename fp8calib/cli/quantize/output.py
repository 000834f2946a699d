"""Write the checkpoint of `fp8calib quantize` and print the report."""

from __future__ import annotations

from fp8calib.api.quantize import run
from fp8calib.api.quantize.report import QuantizationOutcome, build_quantization_report
from fp8calib.api.quantize.run import Planned, write_planned
from fp8calib.cli.console import Bar, say
from fp8calib.cli.quantization_report import show_quantization_report
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.quantization.plan import QuantizePlan
from fp8calib.quantization.quantize import Written
from fp8calib.quantization.rounded_codes import RoundedCodes


def find_finished(settings: QuantizeSettings, plan: QuantizePlan) -> Written | None:
    """With --resume, look for a checkpoint that an earlier run finished."""
    found = run.find_finished(settings.out, plan) if settings.resume else None
    if found is not None:
        say(f"{settings.out} is finished already")
    return found


def write_output(
    settings: QuantizeSettings,
    planned: Planned,
    bar: Bar,
    *,
    device: str,
    rounded: RoundedCodes | None = None,
) -> Written:
    """Write the planned checkpoint; codes in `rounded` are not computed again.

    Raises:
        ExportError: the disk cannot hold the output.
    """
    return write_planned(
        planned,
        settings.out,
        device=device,
        resume=settings.resume,
        force=settings.force,
        inputs=[] if settings.stats is None else [settings.stats],
        progress=bar,
        rounded=rounded,
    )


def show_output(outcome: QuantizationOutcome, settings: QuantizeSettings) -> None:
    """Print the report."""
    show_quantization_report(build_quantization_report(outcome), as_json=settings.as_json)
