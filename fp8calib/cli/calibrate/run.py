"""Run `fp8calib calibrate`: open the model, plan, calibrate, write, report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.atomic import OutputFolder, explain_os_error, measure_folder
from fp8calib.cli.calibrate.fp8_checkpoint import (
    add_checkpoint_report,
    check_replaced_checkpoint,
    explain_refusal,
    make_plan_settings,
    write_checkpoint,
)
from fp8calib.cli.calibrate.processes import (
    check_shard,
    choose_rank_device,
)
from fp8calib.cli.calibrate.recipe import check_excluded, check_observed, resolve_recipe
from fp8calib.cli.calibrate.report import (
    build_calibration_report,
    conclude,
    describe_calibration_plan,
    save_report,
    show_calibration_report,
)
from fp8calib.cli.console import Bar, print_json, prints_json, say, warn
from fp8calib.cli.plan_table import describe_rows, show_plan
from fp8calib.cli.setup import make_placement, quiet_libraries
from fp8calib.data.shares import Share, parse_share
from fp8calib.dialects.dialect import Graft
from fp8calib.dialects.write import (
    check_export,
    check_overlay_source,
    check_replaced,
    write_formats,
)
from fp8calib.errors import ExportError, Fp8CalibError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.jobs.calibration import (
    IF_QUANTIZED,
    fields_of,
    plan_recipe_text,
)
from fp8calib.jobs.models import open_run_model
from fp8calib.jobs.recipe_options import check_query, decide_query, list_ignored
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.memory import choose_calibration_mode
from fp8calib.jobs.resumable.rounding import check_rounding_data
from fp8calib.jobs.resumable.run import RunMeasurements, run_job
from fp8calib.jobs.resumable.work_folder import (
    UnwrittenError,
    check_output_of,
    find_finished,
    make_job_header,
    remove_outputs,
    work_folder,
)
from fp8calib.machine.launch import find_process_rank
from fp8calib.recipe import Recipe
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.run.distributed.group import ProcessGroup, open_process_group
from fp8calib.run.resume.journal import is_checkpoint
from fp8calib.stats.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    StatsHeader,
    save_stats,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def run_calibrate(settings: CalibrateRequest) -> int:
    """Calibrate a model, print the outcome, and return the exit code."""
    recipe = resolve_recipe(settings)
    for text in list_ignored(recipe, given=settings.ignorable):
        warn(text)
    shard = None if settings.shard is None else parse_share(settings.shard)
    quiet_libraries()
    process_rank = find_process_rank(os.environ)
    device = choose_rank_device(settings.device, process_rank, device_map=settings.device_map)
    settings = replace(settings, device=device)
    with open_process_group(process_rank) as group, _open_job(settings, recipe, shard) as job:
        for text in job.plan.warnings if job.plan else ():
            warn(text)
        header = make_job_header(job)
        finished = _find_finished(job, header, group)
        if finished is not None:
            return _show_finished(job, finished)
        mode = choose_calibration_mode(job)
        if settings.dry_run:
            title = "plan (nothing was run or written)"
            described = describe_calibration_plan(job, mode)
            show_plan(described, title, as_json=prints_json(), text=job.plan)
            return 0
        for text in describe_rows(job.plan):
            say(text)
        for text in mode.describe():
            say(text)
        with Bar() as bar, work_folder(job, header, group) as work:
            finished = work.report
            if finished is None:
                stats, measured = run_job(job, mode, work, group, bar)
                if not process_rank.is_first:
                    return 0
                report = _write(job, stats, measured, work.path, bar, settings)
        if finished is not None:
            return _show_finished(job, finished)
    if prints_json():
        print_json(report)
    show_calibration_report(job, stats, report, settings)
    return conclude(report)


def _find_finished(
    job: ResumableJob, header: StatsHeader, group: ProcessGroup | None
) -> Mapping[str, Any] | None:
    """Look for finished output in the first process alone: others may see what it writes now."""
    if group is None:
        return find_finished(job, header)
    found: Mapping[str, Any] | None = group.broadcast(lambda: find_finished(job, header))
    return found


def _show_finished(job: ResumableJob, report: Mapping[str, Any]) -> int:
    say(f"{job.out} is finished already")
    if prints_json():
        print_json(report)
    return 0


@contextmanager
def _open_job(
    settings: CalibrateRequest, recipe: Recipe, shard: Share | None
) -> Iterator[ResumableJob]:
    check_observed(recipe)
    out = settings.out or Path(f"{Path(settings.model).resolve().name}-fp8calib")
    with open_run_model(
        settings.model,
        make_placement(settings),
        revision=settings.revision,
        trust_remote_code=settings.trust_remote_code,
        if_quantized=IF_QUANTIZED,
        recipe=recipe,
    ) as model:
        prepared, checkpoint = model.prepared, model.checkpoint
        fmt = FP8_FORMATS[recipe.scales.fp8_dtype]
        check_query(recipe)
        check_excluded(recipe, prepared)
        check_export(prepared.geometry, recipe.formats, recipe.tp, fmt)
        graft = Graft(replaces_scales=settings.replace_scales)
        check_overlay_source(prepared.geometry, recipe.formats, checkpoint.stored, graft=graft)
        job = ResumableJob(
            **fields_of(model),
            resume=settings.resume,
            force=settings.force,
            expects_duration=settings.dry_run,
            say=say,
            warn=warn,
            recipe=recipe,
            shard=shard,
            plan=None,
            out=out,
            quantization=make_plan_settings(recipe),
        )
        if not settings.dry_run:
            check_output_of(job)
        check_replaced(recipe.formats, out, checkpoint.stored)
        check_replaced_checkpoint(job)
        if refusal := explain_refusal(job):
            folder = recipe.quantize and recipe.quantize.folder
            hint = "use a recipe without `quantize`, such as kv, to have the statistics and scales"
            raise ExportError(f"{folder} cannot be written: {refusal}", hint=hint)
        job = replace(job, plan=plan_recipe_text(model, recipe))
        if job.rounds_by_gptq:
            check_rounding_data(job.plan)
        check_shard(job)
        yield job


def _write(
    job: ResumableJob,
    stats: CalibrationStats,
    measured: RunMeasurements,
    folder: Path,
    bar: Bar,
    settings: CalibrateRequest,
) -> Mapping[str, Any]:
    """Write all output; where a format cannot be written, save at least the statistics."""
    try:
        return _write_all(job, stats, measured, folder, bar, settings)
    except OSError as error:
        failed = explain_os_error(error, job.out, needed_bytes=measure_folder(folder))
    except ExportError as error:
        failed = error
    remove_outputs(folder)
    try:
        with OutputFolder(
            job.out, owned=job.owned, force=job.force, inputs=[job.source.folder]
        ) as kept:
            save_stats(stats, kept / STATS_NAME)
    except Fp8CalibError as error:
        if not any(map(is_checkpoint, folder.iterdir())):
            raise
        raise UnwrittenError(
            error.message,
            hint=f"the run's checkpoints stay in {folder}: fix the cause and add --resume",
        ) from error
    raise ExportError(
        failed.message,
        hint=f"the statistics are saved: `fp8calib export {job.out / STATS_NAME}` writes scales "
        f"without another run. {failed.hint}".strip(),
    ) from failed


def _write_all(
    job: ResumableJob,
    stats: CalibrationStats,
    measured: RunMeasurements,
    folder: Path,
    bar: Bar,
    settings: CalibrateRequest,
) -> Mapping[str, Any]:
    recipe = job.recipe
    save_stats(stats, folder / STATS_NAME)
    written = write_formats(
        stats,
        recipe.formats,
        folder,
        fmt=FP8_FORMATS[recipe.scales.fp8_dtype],
        tps=recipe.tp,
        source=job.checkpoint.stored,
        query=decide_query(recipe, stats).is_written,
        fallback=recipe.scales.fallback,
        rule=recipe.scales.rule,
        graft=Graft(replaces_scales=settings.replace_scales),
    )
    files = sorted([STATS_NAME, REPORT_NAME, *written.files])
    report = build_calibration_report(
        job, stats, measured, folder=folder, files=files, notes=written.notes
    )
    checkpoint = write_checkpoint(job, stats, folder, bar)
    if checkpoint is not None and recipe.quantize is not None:
        add_checkpoint_report(report, checkpoint, recipe.quantize.folder)
    save_report(folder / REPORT_NAME, report)
    return report
