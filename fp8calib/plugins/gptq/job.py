"""Write an FP8 checkpoint with weights rounded by GPTQ: calibrate layer by layer, round, write."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8calib.calibration.calibration_origin import CalibrationOrigin
from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.processes import ProcessGroup
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.hub import find_folder
from fp8calib.checkpoint.output import check_output
from fp8calib.commands.job import CalibrationJob, work_folder
from fp8calib.commands.model import plan_text, prepare_run_model
from fp8calib.commands.quantized import finish_quantized, list_layer_schemes
from fp8calib.commands.recipe import Recipe, apply_request, resolve_text
from fp8calib.commands.request import Reporter
from fp8calib.commands.result import RunPlan
from fp8calib.commands.written import require_servable
from fp8calib.errors import ModelError, UsageError
from fp8calib.model.device import choose_device, choose_rank_device
from fp8calib.model.load import open_source
from fp8calib.model.stored_parameters import UnfilledModelError
from fp8calib.numerics.rules import ScaleRules
from fp8calib.numerics.schemes import list_without_calibration
from fp8calib.plugins.gptq.input_map import map_inputs
from fp8calib.plugins.gptq.request import GptqRequest
from fp8calib.plugins.gptq.result import GptqResult
from fp8calib.plugins.gptq.rounded_codes import RoundedLinear
from fp8calib.plugins.gptq.rounding import (
    Rounding,
    check_rounding_data,
    count_code_bytes,
    list_rounded,
    make_rounding_record,
    open_codes,
)
from fp8calib.quantization.calibrated_scales import (
    check_stats_model,
    find_scales,
    split_static,
)
from fp8calib.quantization.ignored import span_layers, spell_options
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    QuantizePlan,
    make_plan,
    select_linears,
)
from fp8calib.quantization.select import Selection
from fp8calib.quantization.settings import PlanSettings
from fp8calib.quantization.sources.decoded import check_unquantized
from fp8calib.quantization.write import find_finished, write_checkpoint


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqTask:
    """What is rounded, and how it is written."""

    request: GptqRequest
    model: str
    """A folder or Hub id, also of a model that is in memory."""
    settings: PlanSettings
    rules: ScaleRules
    stats: CalibrationStats | None
    """For the scales of inputs, K and V."""
    inputs: Sequence[Path]
    """Files that the output must not replace."""
    reporter: Reporter


@dataclass(frozen=True, slots=True, kw_only=True)
class GptqJob:
    """A task whose model, text and checkpoint are planned; nothing is written yet."""

    task: GptqTask
    job: CalibrationJob
    selection: Selection
    expected: QuantizePlan
    """Input scales that are still to be measured are 1 in it."""


@contextmanager
def open_gptq(task: GptqTask, group: ProcessGroup) -> Iterator[GptqJob]:
    """Open the model and the text, and plan the checkpoint.

    Raises:
        UsageError: an option is invalid, or there is no class that runs the model.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        DataError: the text cannot be read.
        ExportError: the statistics do not fit, or no engine can load the checkpoint.
    """
    request = task.request
    folder = find_folder(task.model, request.revision)
    with Checkpoint.open(folder) as checkpoint:
        check_unquantized(checkpoint)
        selection = select_linears(checkpoint, task.settings)
        recipe, rows = resolve_text(_make_recipe(task), request.data)
        job = _make_job(task, checkpoint, recipe, group)
        text = plan_text(
            *(job.model.source, recipe.data),
            rows=rows,
            part="calibrate",
            tokenizer=request.tokenizer,
        )
        job = replace(job, plan=text)
        check_rounding_data(job.plan)
        for warning in text.warnings:
            task.reporter.warn(warning)
        if task.stats is not None:
            check_stats_model(task.stats, checkpoint)
        else:
            _check_measured(job, split_static(task.settings, selection)[0])
        expected = _plan_checkpoint(job, task, selection, None)
        if not request.allow_unservable and (note := require_servable(expected, folder)):
            task.reporter.warn(note)
        yield GptqJob(task=task, job=job, selection=selection, expected=expected)


def plan_gptq(opened: GptqJob) -> RunPlan:
    """Describe what would be run and written."""
    expected = opened.expected
    schemes = list(list_layer_schemes(expected))
    return opened.job.describe_plan(
        opened.job.choose_mode(),
        out=str(Path(opened.task.request.out)),
        writes=sorted(expected.names),
        scheme=expected.settings.scheme.name,
        **({"layer_schemes": schemes} if schemes else {}),
        linears=len(expected.selection.quantized),
        output_size_bytes=expected.size_bytes,
        work_disk_bytes=count_code_bytes(expected.selection.quantized),
    )


def run_gptq(opened: GptqJob, plain_caches: Sequence[int]) -> GptqResult | None:
    """Round the weights and write the checkpoint; None in all processes but the first.

    `plain_caches` are the layers whose KV cache a recipe wants to stay in 16 bits.

    Raises:
        UsageError: the output folder is in use.
        CalibrationError: an activation is NaN or inf.
        ExportError: the disk cannot hold the output.
    """
    task, job, plan = opened.task, opened.job, opened.expected
    request, started = task.request, time.monotonic()
    rounded: tuple[RoundedLinear, ...] = ()
    out, checkpoint = Path(request.out), job.model.checkpoint
    if request.resume and (written := find_finished(out, plan)) is not None:
        job.reporter.say(f"{out} is finished already")
    else:
        check_output(out, plan.names, request.force, inputs=[job.model.source.folder])
        mode = job.choose_mode()
        for text in mode.describe():
            job.reporter.say(text)
        header = job.make_header()
        with work_folder(job, header) as journal:
            assert isinstance(journal, Journal)  # noqa: S101 -- no report is written there
            stats, _ = job.run(mode, header, journal)
            if not job.group.is_first:
                return None
            plan = _plan_checkpoint(job, task, opened.selection, stats)
            with open_codes(journal.folder) as codes:
                job.reporter.stage("quantizing", plan.data_bytes, unit="bytes")
                written = write_checkpoint(
                    *(checkpoint, plan, out),
                    device=torch.device("cpu"),
                    advance=job.reporter.advance,
                    resume=request.resume,
                    force=request.force,
                    inputs=task.inputs,
                    rounded=codes,
                )
                rounded = tuple(list_rounded(job, opened.selection, codes))
        shutil.rmtree(job.folder, ignore_errors=True)
    made = finish_quantized(
        *(request, checkpoint, plan, written),
        folder=out,
        started=started,
        stats=task.stats,
        plain_caches=plain_caches,
    )
    return GptqResult(**dict(made), rounded=rounded)


# --- before the run -------------------------------------------------------------------------------


def _make_job(
    task: GptqTask, checkpoint: Checkpoint, recipe: Recipe, group: ProcessGroup
) -> CalibrationJob:
    """Make the job of a checkpoint that could be rounded to nearest; it works beside the output.

    Raises:
        UsageError: there is no class that runs the model.
        UnfilledModelError: the checkpoint does not hold the model that its config describes.
    """
    request, out = task.request, Path(task.request.out)
    try:
        source = open_source(
            task.model,
            revision=request.revision,
            trust_remote_code=request.trust_remote_code,
        )
        model = prepare_run_model(
            *(source, checkpoint, recipe),
            name=task.model,
            device=choose_device(choose_rank_device(request.device, group.process_rank)),
            dtype=request.dtype,
            memory=request.memory,
        )
    except UnfilledModelError:
        raise  # of no use for any rounding
    except ModelError as error:
        raise UsageError(
            f"GPTQ runs the model, which is not possible here: {error.message}",
            hint="`fp8calib quantize` needs neither text nor a class of the model",
        ) from error
    return CalibrationJob(
        model=model,
        recipe=recipe,
        out=out.with_name(f"{out.name}.rounding"),
        resume=request.resume,
        force=request.force,
        reporter=task.reporter,
        group=group,
        layer_job=Rounding(task.settings),
    )


def _make_recipe(task: GptqTask) -> Recipe:
    """Make the recipe of a calibration that rounds, and observes what static scales need."""
    has_static_inputs = task.settings.has_static_inputs
    made = Recipe(
        name="gptq",
        observe=Observe(kv=False, query=False, inputs=True, weights=has_static_inputs),
        formats=(),
    )
    return apply_request(made, task.request)


def _check_measured(job: CalibrationJob, static: Sequence[Matrix]) -> None:
    """Refuse linears of a static scheme whose inputs would not be measured, before the run."""
    missing = map_inputs(job.model.prepared, static).unreached
    if not missing:
        return
    patterns = dict.fromkeys(map(span_layers, missing))
    raise UsageError(
        f"no input of {next(iter(missing))} can be measured for a static scale",
        hint=f"leave such linears unquantized: {spell_options(patterns)}; or choose a scheme that "
        f"needs no input scales: {', '.join(list_without_calibration())}",
    )


def _plan_checkpoint(
    job: CalibrationJob,
    task: GptqTask,
    selection: Selection,
    measured: CalibrationStats | None,
) -> QuantizePlan:
    """Plan the checkpoint; input scales that are still to be measured are 1, at their places."""
    asked = task.settings
    static = split_static(asked, selection)[0]
    measures_inputs = bool(static) and task.stats is None
    stats = task.stats or (measured if measures_inputs else None)
    if stats is not None:
        scales = find_scales(stats, job.model.checkpoint, asked, selection, task.rules)
    elif measures_inputs:
        ones = {matrix.module: torch.tensor(1.0) for matrix in static}
        scales = CalibratedScales(inputs=ones, kv={})
    else:
        scales = NO_SCALES
    if scales.origin is None or measures_inputs:
        scales = replace(scales, origin=_find_origin(job))
    assert job.plan is not None  # noqa: S101 -- gptq runs data
    rounding = make_rounding_record(job.plan, asked, measures_inputs=measures_inputs)
    return make_plan(
        job.model.checkpoint,
        asked,
        selection,
        scales=scales,
        rounding=rounding,
        measures_inputs=measures_inputs,
    )


def _find_origin(job: CalibrationJob) -> CalibrationOrigin:
    header = job.make_header()
    return CalibrationOrigin(
        model=header.model_fingerprint,
        data=header.data_fingerprint,
        text_start=header.text_start,
    )
