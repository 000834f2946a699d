"""The rounding of weights while a calibration streams the model."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from fp8calib.calibration.journal import NAME_PREFIX
from fp8calib.checkpoint.disk import require_free_space
from fp8calib.commands.job import CalibrationJob
from fp8calib.data.sequences import DataPlan
from fp8calib.errors import UsageError
from fp8calib.plugins.gptq.core import DAMPING, SCALE_STEPS, searches_scales
from fp8calib.plugins.gptq.hessians import HELD_EVERY, LENGTH_POWER
from fp8calib.plugins.gptq.input_map import map_inputs
from fp8calib.plugins.gptq.layer_rounding import LayerRounding, RoundingTask
from fp8calib.plugins.gptq.rounded_codes import GPTQ, RoundedCodes, RoundedLinear
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.select import Selection
from fp8calib.quantization.settings import PlanSettings

_CODES = f"{NAME_PREFIX}rounding"
"""The folder of codes beside the other checkpoints of a run, which all go when it is finished."""
_SMALLEST = "the smallest that saturate nothing"
_SEARCHED = f"{_SMALLEST}, or up to twice as large: the best of {SCALE_STEPS} for each row"


def check_rounding_data(plan: DataPlan | None) -> None:
    """Refuse a text that is too short to hold back a part of it.

    Raises:
        UsageError: there are too few sequences.
    """
    count = 0 if plan is None else len(plan.sequences)
    if count < HELD_EVERY:
        raise UsageError(
            f"GPTQ needs at least {HELD_EVERY} sequences, and the data gives {count}: "
            f"one of {HELD_EVERY} is held back to measure the error",
            hint="use more text, more --samples, or a shorter --seq-len",
        )


class Rounding:
    """The rounding of the weights of each layer after the text has run through it."""

    why_streamed = "layer by layer: each layer is rounded after the text has run through it"

    def __init__(self, settings: PlanSettings) -> None:
        self._settings = settings

    def _find_task(self, job: CalibrationJob) -> RoundingTask:
        matrices = job.select_matrices(self._settings).quantized
        return RoundingTask(
            settings=self._settings,
            matrices=matrices,
            inputs=map_inputs(job.model.prepared, matrices),
        )

    def estimate_bytes(self, job: CalibrationJob) -> int:
        """Estimate the memory of Hessians."""
        return self._find_task(job).estimate_bytes()

    def open(self, job: CalibrationJob, folder: Path) -> LayerRounding:
        """Make what rounds the weights of each layer into the working folder of a run.

        Raises:
            ExportError: the disk cannot hold the codes.
        """
        task = self._find_task(job)
        codes = RoundedCodes(folder / _CODES)
        if job.group.is_first:
            require_free_space(folder, count_code_bytes(task.matrices))
            codes.begin(_list_options(task.settings))
        return LayerRounding(job.model.checkpoint, task, codes, group=job.group)

    def check_same(self, folder: Path) -> None:
        """Refuse the codes of an interrupted run with other options.

        Raises:
            UsageError: the working folder holds such codes.
        """
        if not RoundedCodes(folder / _CODES).is_of(_list_options(self._settings)):
            raise UsageError(
                f"{folder}: the interrupted run had another scheme or other options",
                hint="omit --resume to start again, or use the options of that run",
            )


def _list_options(settings: PlanSettings) -> dict[str, object]:
    """List the options that the codes depend on, beside the model and the text."""
    return {
        "scheme": settings.scheme.name,
        "power_of_two": settings.has_power_of_two_scales,
        **({"layer_schemes": settings.layer_schemes} if settings.by_pattern else {}),
        "ignore": sorted(settings.ignore),
        "damping": DAMPING,
        "length_power": LENGTH_POWER,
        "scale_steps": SCALE_STEPS,
    }


def count_code_bytes(matrices: Collection[Matrix]) -> int:
    """Count the bytes of the codes of weights, which the disk holds twice until the end."""
    return sum(matrix.shape[0] * matrix.shape[1] for matrix in matrices)


@contextmanager
def open_codes(folder: Path) -> Iterator[RoundedCodes]:
    """Open the codes in the working folder of a run."""
    codes = RoundedCodes(folder / _CODES)
    try:
        yield codes
    finally:
        codes.close()


def make_rounding_record(
    plan: DataPlan, settings: PlanSettings, *, measures_inputs: bool
) -> dict[str, object]:
    """Make the record of the rounding for the checkpoint's metadata."""
    searched = [searches_scales(scheme) for scheme in settings.schemes]
    scales = _SEARCHED if all(searched) else _SMALLEST
    if any(searched) and not all(searched):
        scales = f"per channel: {_SEARCHED}; others: {_SMALLEST}"
    return {
        "rounding": GPTQ,
        "data": plan.fingerprint,
        "sequences": len(plan.sequences),
        # one sequence of this many is not in the Hessians; on these the better rounding is chosen
        "held_back": HELD_EVERY,
        "damping": DAMPING,
        "order": "by falling diagonal of the Hessian",
        "tokens": f"scaled to the power {LENGTH_POWER} of their length",
        "scales": scales,
        # the scales of inputs were measured on the same text, which determines them
        "measures_inputs": measures_inputs,
    }


def list_rounded(
    job: CalibrationJob, selection: Selection, codes: RoundedCodes
) -> list[RoundedLinear]:
    """List how every quantized linear was rounded, in the order of the checkpoint."""
    known = {rounded.module: rounded for rounded in codes.report()}
    reasons = map_inputs(job.model.prepared, selection.quantized).unreached
    return [
        known.get(matrix.module)
        or RoundedLinear(
            module=matrix.module, rounding="nearest", why=reasons.get(matrix.module, "not reached")
        )
        for matrix in selection.quantized
    ]
