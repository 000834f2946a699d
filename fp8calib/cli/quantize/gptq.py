"""Run `fp8calib quantize --rounding gptq`: calibrate layer by layer, round, write."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path

import torch

from fp8calib.api.calibrate import plan_recipe_text
from fp8calib.api.quantize.run import Planned
from fp8calib.api.quantize.servable import require_servable
from fp8calib.calibration import text_hashes_of
from fp8calib.checkpoint.atomic import check_output
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.calibrate.job import CalibrateJob, select_matrices
from fp8calib.cli.calibrate.memory import choose_calibration_mode
from fp8calib.cli.calibrate.processes import choose_rank_device
from fp8calib.cli.calibrate.report import describe_calibration_plan
from fp8calib.cli.calibrate.rounding import (
    check_rounding_data,
    count_code_bytes,
    list_rounded,
    make_rounding_record,
    open_codes,
)
from fp8calib.cli.calibrate.run import run_job
from fp8calib.cli.calibrate.settings import CalibrateSettings
from fp8calib.cli.calibrate.work_folder import make_job_header, work_folder
from fp8calib.cli.console import Bar, say, warn
from fp8calib.cli.plan_table import show_plan
from fp8calib.cli.quantize.output import find_finished, show_output, write_output
from fp8calib.cli.quantize.settings import QuantizeSettings
from fp8calib.cli.setup import make_placement, quiet_libraries
from fp8calib.errors import ModelError, UsageError
from fp8calib.fp8.schemes import GPTQ, NEAREST, list_without_calibration
from fp8calib.machine.devices import choose_device
from fp8calib.machine.launch import find_process_rank
from fp8calib.model.dtype import choose_dtype
from fp8calib.model.load import build_skeleton, find_folder, open_source
from fp8calib.model.prepared import prepare
from fp8calib.quantization.calibrated_scales import check_stats_model, find_scales
from fp8calib.quantization.gptq.input_map import map_inputs
from fp8calib.quantization.plan import (
    NO_SCALES,
    CalibratedScales,
    PlanSettings,
    QuantizePlan,
    make_plan,
)
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.recipe import Data, Observe, Quantize, Recipe
from fp8calib.run.distributed.group import ProcessGroup, open_process_group
from fp8calib.run.forward.decoder import check_runnable
from fp8calib.selection.patterns import span_layers, spell_options
from fp8calib.selection.select import Selection, select
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.calibration_stats import CalibrationStats, load_stats


def run_gptq(settings: QuantizeSettings, asked: PlanSettings) -> None:
    """Quantize a checkpoint with weights rounded by GPTQ, and print the outcome.

    Raises:
        UsageError: an option is invalid, or there is no class that runs the model.
        ModelError: the model cannot be read, is quantized already, or its layout is not known.
        CalibrationError: an activation is NaN or inf.
        ExportError: the statistics do not fit, or the disk cannot hold the output.
    """
    quiet_libraries()
    rank = find_process_rank(os.environ)
    given = None if settings.stats is None else load_stats(settings.stats)
    calibrate = _make_calibrate_settings(settings)
    calibrate = replace(calibrate, device=choose_rank_device(calibrate, rank))
    with open_process_group(rank) as group, _open_job(calibrate, asked) as job:
        for text in job.plan.warnings if job.plan else ():
            warn(text)
        if given is not None:
            check_stats_model(given, job.checkpoint)
        selection = select_matrices(job, asked)
        if asked.scheme.has_static_inputs and given is None:
            _check_measured(job, selection)
        expected = _plan_checkpoint(job, asked, selection, given, None)
        if not settings.allow_unservable and (
            note := require_servable(expected, job.checkpoint.folder)
        ):
            say(note)
        if settings.dry_run:
            _show_plan(settings, job, expected)
            return
        if (written := find_finished(settings, expected)) is not None:
            planned = Planned(checkpoint=job.checkpoint, plan=expected)
            now = time.monotonic()
            show_output(planned.finish(written, settings.out, started=now, stats=given), settings)
            return
        check_output(settings.out, expected.names, settings.force, inputs=[job.source.folder])
        _run(settings, asked, job, selection, given, group)


def _run(
    settings: QuantizeSettings,
    asked: PlanSettings,
    job: CalibrateJob,
    selection: Selection,
    given: CalibrationStats | None,
    group: ProcessGroup | None,
) -> None:
    started = time.monotonic()
    mode = choose_calibration_mode(job)
    for text in mode.describe():
        say(text)
    with Bar() as bar, work_folder(job, make_job_header(job), group) as work:
        stats, _ = run_job(job, mode, work, group, bar)
        if group is not None and not group.is_first:
            return
        plan = _plan_checkpoint(job, asked, selection, given, stats)
        planned = Planned(checkpoint=job.checkpoint, plan=plan)
        with open_codes(work.path) as codes:
            written = write_output(settings, planned, bar, device="cpu", rounded=codes)
            rounded = list_rounded(job, selection, codes)
    shutil.rmtree(job.out, ignore_errors=True)
    outcome = planned.finish(written, settings.out, started=started, stats=given)
    show_output(replace(outcome, rounded=rounded), settings)


# --- before the run -------------------------------------------------------------------------------


def _make_calibrate_settings(settings: QuantizeSettings) -> CalibrateSettings:
    """Make the options of the calibration that rounds; it works beside the output."""
    names = {field.name for field in fields(CalibrateSettings)} - {"out"}
    shared = [field.name for field in fields(settings) if field.name in names]
    return CalibrateSettings(
        out=settings.out.with_name(f"{settings.out.name}.rounding"),
        **{name: getattr(settings, name) for name in shared},
    )


@contextmanager
def _open_job(settings: CalibrateSettings, asked: PlanSettings) -> Iterator[CalibrateJob]:
    folder = find_folder(settings.model, settings.revision)
    with Checkpoint.open(folder, require_config=True) as checkpoint:
        check_unquantized(checkpoint)
        select(checkpoint, ignore=asked.ignore)
        job = _make_job(settings, asked, checkpoint)
        job = replace(job, plan=plan_recipe_text(job, job.recipe))
        check_rounding_data(job.plan)
        yield job


def _make_job(
    settings: CalibrateSettings, asked: PlanSettings, checkpoint: Checkpoint
) -> CalibrateJob:
    """Make the job of a checkpoint that could be rounded to nearest.

    Raises:
        UsageError: there is no class that runs the model.
    """
    device = choose_device(settings.device)
    dtype, why = choose_dtype(settings.dtype, device=device, checkpoint=checkpoint)
    recipe = _make_recipe(settings, asked)
    try:
        source = open_source(
            settings.model,
            revision=settings.revision,
            trust_remote_code=settings.trust_remote_code,
            if_quantized=None,
        )
        prepared = prepare(build_skeleton(source), checkpoint, recipe)
        check_runnable(prepared.model)
    except ModelError as error:
        raise UsageError(
            f"--rounding {GPTQ} runs the model, which is not possible here: {error.message}",
            hint=f"--rounding {NEAREST} needs neither text nor a class of the model",
        ) from error
    return CalibrateJob(
        name=settings.model,
        placement=make_placement(settings),
        settings=settings,
        recipe=recipe,
        shard=None,
        source=source,
        checkpoint=checkpoint,
        prepared=prepared,
        plan=None,
        out=settings.out or Path(),
        device=device,
        dtype=dtype,
        dtype_why=why,
        quantization=asked,
    )


def _make_recipe(settings: CalibrateSettings, asked: PlanSettings) -> Recipe:
    """Make the recipe of a calibration that rounds, and observes what static scales need."""
    given = {
        "samples": settings.samples,
        "seq_len": settings.seq_len,
        "batch_size": settings.batch_size,
    }
    return Recipe(
        name=f"quantize --rounding {GPTQ}",
        observe=Observe(kv=False, query=False, inputs=True, weights=asked.scheme.has_static_inputs),
        data=Data(
            sources=tuple(settings.data or ()),
            pack=not settings.no_pack,
            **{name: value for name, value in given.items() if value is not None},
        ),
        formats=(),
        quantize=Quantize(scheme=asked.scheme.name, rounding=GPTQ, ignore=asked.ignore),
    )


def _check_measured(job: CalibrateJob, selection: Selection) -> None:
    """Refuse linears whose inputs would not be measured, before the run."""
    missing = map_inputs(job.prepared, selection.quantized).unreached
    if not missing:
        return
    patterns = dict.fromkeys(map(span_layers, missing))
    raise UsageError(
        f"--rounding {GPTQ}: no input of {next(iter(missing))} can be measured for a static scale",
        hint=f"leave such linears unquantized: {spell_options(patterns)}; or choose a scheme that "
        f"needs no input scales: {', '.join(list_without_calibration())}",
    )


# --- the checkpoint -------------------------------------------------------------------------------


def _plan_checkpoint(
    job: CalibrateJob,
    asked: PlanSettings,
    selection: Selection,
    given: CalibrationStats | None,
    measured: CalibrationStats | None,
) -> QuantizePlan:
    """Plan the checkpoint; input scales that are still to be measured are 1, at their places."""
    measures_inputs = asked.scheme.has_static_inputs and given is None
    stats = given or (measured if measures_inputs else None)
    if stats is not None:
        scales = find_scales(stats, job.checkpoint, asked, selection)
    elif measures_inputs:
        ones = {matrix.module: torch.tensor(1.0) for matrix in selection.quantized}
        scales = CalibratedScales(inputs=ones, kv={})
    else:
        scales = NO_SCALES
    if scales.origin is None or measures_inputs:
        scales = replace(scales, origin=_find_origin(job))
    assert job.plan is not None  # noqa: S101 -- gptq runs data
    rounding = make_rounding_record(job.plan, asked.scheme, measures_inputs=measures_inputs)
    return make_plan(job.checkpoint, asked, selection, scales=scales, rounding=rounding)


def _find_origin(job: CalibrateJob) -> CalibrationOrigin:
    header = make_job_header(job)
    return CalibrationOrigin(
        model=header.model_fingerprint, data=header.data_fingerprint, text=text_hashes_of(job.plan)
    )


def _show_plan(settings: QuantizeSettings, job: CalibrateJob, expected: QuantizePlan) -> None:
    described = describe_calibration_plan(job, choose_calibration_mode(job))["plan"]
    codes = count_code_bytes(expected.selection.quantized)
    plan = {
        **described,
        "out": str(settings.out),
        "writes": sorted(expected.names),
        "scheme": expected.settings.scheme.name,
        "rounding": GPTQ,
        "linears": len(expected.selection.quantized),
        "output_size_bytes": expected.size_bytes,
        "work_disk_bytes": codes,
    }
    title = "plan (nothing was run or written)"
    show_plan({"plan": plan}, title, as_json=settings.as_json)
