"""Write an FP8 checkpoint with weights rounded by GPTQ: calibrate layer by layer, round, write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib.api.calibrate import plan_recipe_text
from fp8calib.api.models import Placement
from fp8calib.api.quantize.planned import Planned, find_finished, write_planned
from fp8calib.api.quantize.report import QuantizationOutcome
from fp8calib.api.quantize.servable import require_servable
from fp8calib.api.resumable.job import ResumableJob, select_matrices
from fp8calib.api.resumable.memory import choose_calibration_mode
from fp8calib.api.resumable.rounding import (
    check_rounding_data,
    list_rounded,
    make_rounding_record,
    open_codes,
)
from fp8calib.api.resumable.run import run_job
from fp8calib.api.resumable.work_folder import make_job_header, work_folder
from fp8calib.api.text import TextData
from fp8calib.calibration import Progress, text_hashes_of
from fp8calib.checkpoint.atomic import check_output
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError, UsageError
from fp8calib.fp8.schemes import GPTQ, NEAREST, list_without_calibration
from fp8calib.machine.devices import choose_device
from fp8calib.model.dtype import choose_dtype
from fp8calib.model.load import build_skeleton, find_folder, open_source
from fp8calib.model.prepared import prepare
from fp8calib.model.stored_parameters import UnfilledModelError
from fp8calib.quantization.calibrated_scales import (
    check_stats_model,
    find_scales,
    split_static,
)
from fp8calib.quantization.gptq.input_map import map_inputs
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    PlanSettings,
    QuantizePlan,
    make_plan,
    select_linears,
)
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.recipe import Data, Observe, Recipe
from fp8calib.run.distributed.group import ProcessGroup
from fp8calib.run.forward.decoder import check_runnable
from fp8calib.selection.matrices import Matrix
from fp8calib.selection.patterns import span_layers, spell_options
from fp8calib.selection.select import Selection
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.calibration_stats import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqTask:
    """What to round, on which text, and where to write it."""

    model: str
    out: Path
    asked: PlanSettings
    stats: CalibrationStats | None
    """For the scales of inputs, K and V."""
    inputs: Sequence[Path]
    """Files that the output must not replace."""
    data: Data
    """How much text; its sources are used where there are no `rows`."""
    rows: TextData | None = None
    tokenizer: Any = None
    placement: Placement
    revision: str | None
    trust_remote_code: bool
    allow_unservable: bool
    resume: bool
    force: bool
    expects_duration: bool = False
    say: Callable[[str], None]
    warn: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqJob:
    """A task whose model, text and checkpoint are planned; nothing is written yet."""

    task: GptqTask
    job: ResumableJob
    selection: Selection
    expected: QuantizePlan
    """Input scales that are still to be measured are 1 in it."""


@contextmanager
def open_gptq(task: GptqTask) -> Iterator[GptqJob]:
    """Open the model and the text, and plan the checkpoint.

    Raises:
        UsageError: an option is invalid, or there is no class that runs the model.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        DataError: the text cannot be read.
        ExportError: the statistics do not fit, or no engine can load the checkpoint.
    """
    with _open_job(task) as job:
        for text in job.plan.warnings if job.plan else ():
            task.warn(text)
        if task.stats is not None:
            check_stats_model(task.stats, job.checkpoint)
        selection = select_matrices(job, task.asked)
        if task.stats is None:
            _check_measured(job, split_static(task.asked, selection)[0])
        expected = _plan_checkpoint(job, task.asked, selection, task.stats, None)
        if not task.allow_unservable and (
            note := require_servable(expected, job.checkpoint.folder)
        ):
            task.warn(note)
        yield GptqJob(task=task, job=job, selection=selection, expected=expected)


def run_gptq(
    opened: GptqJob, progress: Progress, group: ProcessGroup | None = None
) -> QuantizationOutcome | None:
    """Round the weights and write the checkpoint; None in all processes but the first.

    Raises:
        UsageError: the output folder is in use.
        CalibrationError: an activation is NaN or inf.
        ExportError: the disk cannot hold the output.
    """
    task, job, expected = opened.task, opened.job, opened.expected
    started = time.monotonic()
    if task.resume and (written := find_finished(task.out, expected)) is not None:
        task.say(f"{task.out} is finished already")
        planned = Planned(checkpoint=job.checkpoint, plan=expected)
        return planned.finish(written, task.out, started=started, stats=task.stats)
    check_output(task.out, expected.names, task.force, inputs=[job.source.folder])
    mode = choose_calibration_mode(job)
    for text in mode.describe():
        task.say(text)
    with work_folder(job, make_job_header(job), group) as work:
        stats, _ = run_job(job, mode, work, group, progress)
        if group is not None and not group.is_first:
            return None
        plan = _plan_checkpoint(job, task.asked, opened.selection, task.stats, stats)
        planned = Planned(checkpoint=job.checkpoint, plan=plan)
        with open_codes(work.path) as codes:
            written = write_planned(
                planned,
                task.out,
                device="cpu",
                resume=task.resume,
                force=task.force,
                inputs=task.inputs,
                progress=progress,
                rounded=codes,
            )
            rounded = list_rounded(job, opened.selection, codes)
    shutil.rmtree(job.out, ignore_errors=True)
    outcome = planned.finish(written, task.out, started=started, stats=task.stats)
    return replace(outcome, rounded=rounded)


# --- before the run -------------------------------------------------------------------------------


@contextmanager
def _open_job(task: GptqTask) -> Iterator[ResumableJob]:
    task.placement.check()
    folder = find_folder(task.model, task.revision)
    with Checkpoint.open(folder, require_config=True) as checkpoint:
        check_unquantized(checkpoint)
        select_linears(checkpoint, task.asked)
        job = _make_job(task, checkpoint)
        plan = plan_recipe_text(job, job.recipe, task.rows, tokenizer=task.tokenizer)
        job = replace(job, plan=plan)
        check_rounding_data(job.plan)
        yield job


def _make_job(task: GptqTask, checkpoint: Checkpoint) -> ResumableJob:
    """Make the job of a checkpoint that could be rounded to nearest; it works beside the output.

    Raises:
        UsageError: there is no class that runs the model.
        UnfilledModelError: the checkpoint does not hold the model that its config describes.
    """
    device = choose_device(task.placement.device)
    dtype, why = choose_dtype(task.placement.dtype, device=device, checkpoint=checkpoint)
    recipe = _make_recipe(task)
    try:
        source = open_source(
            task.model,
            revision=task.revision,
            trust_remote_code=task.trust_remote_code,
            if_quantized=None,
        )
        prepared = prepare(build_skeleton(source), checkpoint, recipe)
        check_runnable(prepared.model)
    except UnfilledModelError:
        raise  # of no use for any rounding
    except ModelError as error:
        raise UsageError(
            f"--rounding {GPTQ} runs the model, which is not possible here: {error.message}",
            hint=f"--rounding {NEAREST} needs neither text nor a class of the model",
        ) from error
    return ResumableJob(
        name=task.model,
        placement=task.placement,
        recipe=recipe,
        source=source,
        checkpoint=checkpoint,
        prepared=prepared,
        plan=None,
        out=task.out.with_name(f"{task.out.name}.rounding"),
        resume=task.resume,
        force=task.force,
        expects_duration=task.expects_duration,
        say=task.say,
        warn=task.warn,
        device=device,
        dtype=dtype,
        dtype_why=why,
        quantization=task.asked,
    )


def _make_recipe(task: GptqTask) -> Recipe:
    """Make the recipe of a calibration that rounds, and observes what static scales need."""
    has_static_inputs = task.asked.schemes.has_static_inputs
    return Recipe(
        name=f"quantize --rounding {GPTQ}",
        observe=Observe(kv=False, query=False, inputs=True, weights=has_static_inputs),
        data=task.data,
        formats=(),
    )


def _check_measured(job: ResumableJob, static: Sequence[Matrix]) -> None:
    """Refuse linears of a static scheme whose inputs would not be measured, before the run."""
    missing = map_inputs(job.prepared, static).unreached
    if not missing:
        return
    patterns = dict.fromkeys(map(span_layers, missing))
    raise UsageError(
        f"--rounding {GPTQ}: no input of {next(iter(missing))} can be measured for a static scale",
        hint=f"leave such linears unquantized: {spell_options(patterns)}; or choose a scheme that "
        f"needs no input scales: {', '.join(list_without_calibration())}",
    )


def _plan_checkpoint(
    job: ResumableJob,
    asked: PlanSettings,
    selection: Selection,
    given: CalibrationStats | None,
    measured: CalibrationStats | None,
) -> QuantizePlan:
    """Plan the checkpoint; input scales that are still to be measured are 1, at their places."""
    static = split_static(asked, selection)[0]
    measures_inputs = bool(static) and given is None
    stats = given or (measured if measures_inputs else None)
    if stats is not None:
        scales = find_scales(stats, job.checkpoint, asked, selection)
    elif measures_inputs:
        ones = {matrix.module: torch.tensor(1.0) for matrix in static}
        scales = CalibratedScales(inputs=ones, kv={})
    else:
        scales = NO_SCALES
    if scales.origin is None or measures_inputs:
        scales = replace(scales, origin=_find_origin(job))
    assert job.plan is not None  # noqa: S101 -- gptq runs data
    rounding = make_rounding_record(job.plan, asked.schemes, measures_inputs=measures_inputs)
    return make_plan(job.checkpoint, asked, selection, scales=scales, rounding=rounding)


def _find_origin(job: ResumableJob) -> CalibrationOrigin:
    header = make_job_header(job)
    return CalibrationOrigin(
        model=header.model_fingerprint, data=header.data_fingerprint, text=text_hashes_of(job.plan)
    )
