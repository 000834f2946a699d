"""The FP8 checkpoint that `calibrate` writes for a recipe with `quantize`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.atomic import refuse_unknown_entries
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.overlay import CARD_NAME, find_side_files
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.commands.calibrate import CalibrateResult, NotQuantized
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.errors import ExportError, ModelError
from fp8calib.jobs.quantization.planned import Planned
from fp8calib.jobs.resumable.job import ResumableJob, select_matrices
from fp8calib.quantization.calibrated_scales import find_scales, list_unmeasured, split_static
from fp8calib.quantization.plan import PlanSettings, make_plan
from fp8calib.quantization.quantize import quantize
from fp8calib.quantization.select import select


def check_checkpoint(job: ResumableJob) -> None:
    """Refuse before the run what cannot be quantized, or would replace other files.

    Raises:
        UsageError: naming the files that would be lost.
        ExportError: the weights cannot be quantized.
    """
    if job.recipe.quantize is None or job.quantization is None:
        return
    name = job.recipe.quantize.folder
    folder = job.folder / name
    shards = {path.name for path in job.checkpoint.weight_files} | {SINGLE_FILE_NAME, INDEX_NAME}
    sides = {name.split("/")[0] for name in find_side_files(job.checkpoint)[0]}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    refuse_unknown_entries(folder, found - shards - sides - {CONFIG_NAME, CARD_NAME})
    try:
        select_matrices(job, job.quantization)
    except (ModelError, ExportError) as error:
        hint = "use a recipe without `quantize`, such as kv, to have the statistics and scales"
        raise ExportError(f"{name} cannot be written: {error.message}", hint=hint) from error


def add_checkpoint(
    job: ResumableJob, stats: CalibrationStats, folder: Path, result: CalibrateResult
) -> CalibrateResult:
    """Write the recipe's checkpoint, if it has one, under `folder`, and add it to the result.

    Where it cannot be written, the result says why: statistics and scales of a long run are kept.
    """
    if job.recipe.quantize is None or job.quantization is None:
        return result
    name = job.recipe.quantize.folder
    try:
        checkpoint = _quantize(job, job.quantization, stats, folder)
    except (ModelError, ExportError) as error:
        scheme = job.quantization.schemes.default.name
        why = "; ".join(filter(None, (error.message, error.hint)))
        failure = f"{name} is not written: {why}"
        return result.model_copy(
            update={
                "quantize": NotQuantized(scheme=scheme, why=why),
                "failure": failure,
                "warnings": (*result.warnings, failure),
            }
        )
    files = sorted([*result.files, *(f"{name}/{file}" for file in checkpoint.files)])
    notes = (f"{name}: {note}" for note in (*checkpoint.notes, *checkpoint.describe_dead()))
    return result.model_copy(
        update={
            "quantize": checkpoint,
            "files": tuple(files),
            "warnings": (*result.warnings, *notes),
        }
    )


def _quantize(
    job: ResumableJob, asked: PlanSettings, stats: CalibrationStats, folder: Path
) -> QuantizeResult:
    started = time.monotonic()
    name, settings = asked.schemes.name, asked
    selection = select_matrices(job, settings)
    unmeasured = list_unmeasured(stats, *split_static(settings, selection))
    if unmeasured:
        settings = replace(settings, ignore=(*asked.ignore, *unmeasured))
        selection = select(job.checkpoint, ignore=settings.ignore)
    scales = find_scales(stats, job.checkpoint, settings, selection, job.recipe.scales)
    plan = make_plan(job.checkpoint, settings, selection, scales=scales)
    job.reporter.stage("quantizing", plan.data_bytes, unit="bytes")
    written = quantize(
        job.checkpoint,
        plan,
        folder / name,
        device=torch.device("cpu"),
        advance=job.reporter.advance,
    )
    notes = (  # notes on scales are in the report already
        f"{module}: left unquantized: outside the decoder layers inputs are not observed"
        for module in unmeasured
    )
    return Planned(checkpoint=job.checkpoint, plan=plan, notes=tuple(notes)).describe(
        written, out=job.folder / name, started=started, stats=stats, served=job.recipe.quantize
    )
