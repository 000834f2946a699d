"""Run calibration text through a model: plan, calibrate, write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibrate import TextEngine
from fp8calib.calibration.calibration_stats import (
    REPORT_NAME,
    STATS_NAME,
    CalibrationStats,
    save_stats,
)
from fp8calib.calibration.journal import is_checkpoint
from fp8calib.calibration.processes import ProcessGroup, open_process_group
from fp8calib.checkpoint.atomic import measure_folder, output_folder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.disk import explain_os_error
from fp8calib.checkpoint.overlay import CARD_NAME
from fp8calib.commands.calibrate import CalibrateRequest, CalibrateResult
from fp8calib.commands.options import FORMATS, TP
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.result import RunHashes, WrittenCheck
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.written import check_formats, check_written
from fp8calib.data.rows import Row
from fp8calib.data.shares import Share, parse_share
from fp8calib.errors import ExportError, Fp8CalibError, UsageError
from fp8calib.formats.compute import find_site_rules
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.write import (
    check_export,
    check_overlay_source,
    check_replaced,
)
from fp8calib.jobs.calibration import IF_QUANTIZED, choose_mode, run_job
from fp8calib.jobs.calibration_result import (
    make_calibrate_result,
    make_run_plan,
)
from fp8calib.jobs.card import CardJob, add_card, write_cards
from fp8calib.jobs.fp8_checkpoint import (
    add_checkpoint,
    check_checkpoint,
)
from fp8calib.jobs.function import as_function
from fp8calib.jobs.hashes import Known, hash_run, hashing
from fp8calib.jobs.models import RunModel, fields_of, open_run_model
from fp8calib.jobs.quantization.planned import resolve_recipe
from fp8calib.jobs.recipe_options import (
    apply_request,
    check_query,
    decide_query,
    list_given,
    list_ignored,
    open_recipe,
    resolve_text,
    write_recipe,
)
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.work_folder import (
    UnwrittenError,
    check_output_of,
    find_finished,
    make_job_header,
    remove_outputs,
    work_folder,
)
from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
from fp8calib.jobs.text import plan_text
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.model.device import choose_rank_device
from fp8calib.model.prepared import PreparedModel
from fp8calib.numerics.formats import FP8_FORMATS


def run(
    request: CalibrateRequest,
    reporter: Reporter,
    process_rank: ProcessRank = ALONE,
    *,
    make_engine: Callable[[ResumableJob], TextEngine] | None = None,
) -> CalibrateResult | RunPlan | None:
    """Calibrate a model; a dry run gives the plan, and other processes than the first one nothing.

    `make_engine` makes what runs the text in place of transformers.

    A model in memory keeps its parameters, hooks, caches and modes. Its statistics belong to the
    checkpoint that `save_pretrained` writes of it.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        RecipeError: the recipe is invalid.
        ModelError: the model cannot be read or run, or is quantized in a form that cannot be read.
        DataError: the data cannot be read.
        CalibrationError: the forward pass failed, or gave NaN or infinity.
        ExportError: a format or the checkpoint of the recipe cannot be written.
    """
    if request.out is None:
        _refuse_unwritten(request)
    asked = apply_request(open_recipe(str(request.recipe)), request)
    recipe, rows = resolve_text(asked, request.data)
    recipe = _leave_out_unwritten(request, recipe, reporter)
    given = (name for name in list_given(request) if request.out is not None or name != TP.flags)
    for text in list_ignored(recipe, list(given)):
        reporter.warn(text)
    shard = None if request.shard is None else parse_share(request.shard)
    device = choose_rank_device(request.device, process_rank, device_map=request.device_map)
    request = replace(request, device=device)
    with (
        open_process_group(process_rank) as group,
        _open_job(request, recipe, rows, shard, reporter, group, make_engine) as job,
    ):
        told = _warn_each(reporter, job.plan.warnings if job.plan else (), ())
        result = _run(job, request)
        if isinstance(result, CalibrateResult) and not result.was_finished:
            files = warn_of_tokenizer(request.model, request.tokenizer, result.files)
            _warn_each(reporter, (*result.warnings, *files), (*told, result.failure))
        return result


def _warn_each(reporter: Reporter, texts: Iterable[str], told: Iterable[str]) -> tuple[str, ...]:
    new = tuple(text for text in texts if text not in told)
    for text in new:
        reporter.warn(text)
    return new


def _run(job: ResumableJob, request: CalibrateRequest) -> CalibrateResult | RunPlan | None:
    header = make_job_header(job)
    # The first process alone looks for it: others may see what it writes now.
    finished = find_finished(job, header) if job.group.is_first else None
    if job.group.broadcast(lambda: finished is not None):
        return _tell_finished(job, finished)
    mode = choose_mode(job)
    if request.dry_run:
        return make_run_plan(job, mode)
    if job.out is None:
        stats, cost = run_job(job, mode, header, None)
        return make_calibrate_result(job, stats, cost) if job.group.is_first else None
    rows = () if job.plan is None or job.plan.rows is None else job.plan.rows.describe()
    for text in (*rows, *mode.describe()):
        job.reporter.say(text)
    model = None if job.is_live or not job.group.is_first else job.source.folder
    with work_folder(job, header) as journal, hashing(model, job.device) as find_known:
        if isinstance(journal, CalibrateResult):
            return _tell_finished(job, journal)
        stats, cost = run_job(job, mode, header, journal)
        if not job.group.is_first:
            return None
        return _write(job, stats, cost, journal.folder, request, find_known)


# --- before the run -------------------------------------------------------------------------------


def _refuse_unwritten(request: CalibrateRequest) -> None:
    """Refuse options for files that are not written."""
    given = {
        FORMATS.flags: request.formats,
        "--resume": request.resume,
        "--force": request.force,
        "--replace-scales": request.replace_scales,
    }
    if needless := [option for option, value in given.items() if value]:
        raise UsageError(
            f"{needless[0]}: nothing is written without --out", hint="add --out, or leave it out"
        )


def _leave_out_unwritten(request: CalibrateRequest, recipe: Recipe, reporter: Reporter) -> Recipe:
    """Leave out of the recipe what is not written: without a folder, and for a shard."""
    if request.shard is not None and request.formats:
        reporter.warn("--format has no effect on a shard: `fp8calib export` of all shards takes it")
    if request.shard is None and request.out is not None:
        return recipe
    # a shard has no outputs that need the statistics of all
    return recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})


def _tell_finished(job: ResumableJob, finished: CalibrateResult | None) -> CalibrateResult | None:
    if finished is not None:
        job.reporter.say(f"{job.out} is finished already")
    return finished


@contextmanager
def _open_job(
    request: CalibrateRequest,
    recipe: Recipe,
    rows: Iterable[Row] | None,
    shard: Share | None,
    reporter: Reporter,
    group: ProcessGroup,
    make_engine: Callable[[ResumableJob], TextEngine] | None,
) -> Iterator[ResumableJob]:
    _check_observed(recipe)
    with (
        open_run_model(
            request,
            if_quantized=IF_QUANTIZED,
            recipe=recipe,
            can_be_sharded=request.out is None,  # every process would write
        ) as opened,
        ExitStack() as stack,
    ):
        model = _give_files(opened, request, recipe, stack)
        prepared, checkpoint = model.prepared, model.checkpoint
        fmt = FP8_FORMATS[recipe.scales.fp8_dtype]
        check_query(recipe)
        _check_excluded(recipe, prepared)
        find_site_rules(recipe.scales.rules, prepared.geometry)  # refuses unmatched patterns
        check_export(prepared.geometry, recipe.formats, recipe.tp, fmt)
        check_overlay_source(
            prepared.geometry,
            recipe.formats,
            checkpoint.stored,
            replaces_scales=request.replace_scales,
        )
        job = ResumableJob(
            **fields_of(model),
            resume=request.resume,
            force=request.force,
            reporter=reporter,
            group=group,
            recipe=recipe,
            shard=shard,
            plan=None,
            out=None if request.out is None else Path(request.out),
            quantization=None if recipe.quantize is None else resolve_recipe(recipe.quantize),
        )
        if make_engine is not None:
            job = replace(job, engine=make_engine(job))
        if job.out is not None:
            _check_outputs(job, dry_run=request.dry_run)
        if recipe.observe.needs_forward:
            text = plan_text(
                model.source,
                recipe.data,
                rows=rows,
                part="calibrate",
                tokenizer=request.tokenizer,
            )
            specs = recipe.data.sources if rows is None else ()
            job = replace(job, plan=text, specs=specs)
        if shard is not None and job.plan is None:
            raise UsageError(
                f"--shard: recipe {recipe.name} runs no data, so there is nothing to divide",
                hint="leave out --shard",
            )
        job.list_batches()  # refuses a shard without any
        yield job


def _give_files(
    model: RunModel, request: CalibrateRequest, recipe: Recipe, stack: ExitStack
) -> RunModel:
    """Give a model in memory the files that an overlay or FP8 checkpoint of it is made from."""
    needs_files = recipe.quantize is not None or any(
        find_dialect(name).needs_model for name in recipe.formats
    )
    if not model.is_live or not needs_files or request.out is None:
        return model
    folder = stack.enter_context(saved_model(request.model, Path(request.out), request.tokenizer))
    checkpoint = stack.enter_context(Checkpoint.open(Path(folder)))
    return replace(model, checkpoint=checkpoint)


def _check_outputs(job: ResumableJob, *, dry_run: bool) -> None:
    """Refuse an output folder that is in use, and a checkpoint that cannot be written."""
    if not dry_run:
        check_output_of(job)
    check_replaced(job.recipe.formats, job.folder, job.checkpoint.stored)
    check_checkpoint(job)


def _check_excluded(recipe: Recipe, prepared: PreparedModel) -> None:
    """Refuse formats whose K and V the recipe excludes, before text is run."""
    modules = (attention.module for _, attention in prepared.geometry.attentions())
    excluded = next((module for module in modules if module in prepared.ignored), None)
    if recipe.formats and excluded is not None:
        raise UsageError(
            f"{', '.join(recipe.formats)}: needs K and V of {excluded}, which recipe "
            f"{recipe.name} excludes",
            hint="take it out of observe.ignore, or write `formats: []`",
        )


def _check_observed(recipe: Recipe) -> None:
    """Refuse unknown formats, and those whose scales the recipe does not observe."""
    observe = recipe.observe
    with_linears = [name for name in recipe.formats if find_dialect(name).has_linears]
    if recipe.formats and not observe.kv:
        raise UsageError(
            f"{', '.join(recipe.formats)}: recipe {recipe.name} does not observe K and V",
            hint="choose another recipe",
        )
    if with_linears and not (observe.inputs and observe.weights):
        raise UsageError(
            f"{', '.join(with_linears)}: needs inputs and weights, and recipe {recipe.name} does "
            "not observe both",
            hint="choose another recipe",
        )
    if recipe.query_scale is True and not observe.query:
        raise UsageError(f"--query-scale: recipe {recipe.name} does not observe q")


# --- after the run --------------------------------------------------------------------------------


def _write(
    job: ResumableJob,
    stats: CalibrationStats,
    cost: Mapping[str, Any],
    folder: Path,
    request: CalibrateRequest,
    find_known: Callable[[], Known],
) -> CalibrateResult:
    """Write all output; where a format cannot be written, save at least the statistics."""
    try:
        return _write_all(job, stats, cost, folder, request, find_known)
    except OSError as error:
        failed = explain_os_error(error, job.folder, needed_bytes=measure_folder(folder))
    except ExportError as error:
        failed = error
    remove_outputs(folder)
    try:
        with output_folder(
            job.folder, owned=job.owned, force=job.force, inputs=[job.source.folder]
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
        hint=f"the statistics are saved: `fp8calib export {job.folder / STATS_NAME} --model "
        f"{job.name} --format kv-overlay --out DIR` writes scales without another run. "
        f"{failed.hint}".strip(),
    ) from failed


def _write_all(
    job: ResumableJob,
    stats: CalibrationStats,
    cost: Mapping[str, Any],
    folder: Path,
    request: CalibrateRequest,
    find_known: Callable[[], Known],
) -> CalibrateResult:
    recipe = job.recipe
    save_stats(stats, folder / STATS_NAME)
    written = write_recipe(
        recipe,
        stats,
        folder,
        source=job.checkpoint.stored,
        query=decide_query(recipe, stats).is_written,
        attachment=Attachment(replaces_scales=request.replace_scales),
    )
    files = sorted([STATS_NAME, REPORT_NAME, *written.files])
    result = make_calibrate_result(job, stats, cost, files=files, notes=written.notes)
    result = add_checkpoint(job, stats, folder, result)
    if request.check:
        result = result.model_copy(update={"checked": _check_written(job, folder, result)})
    result = _add_cards(job, folder, result, request)
    hashes = _hash_files(job, folder, result.files, find_known())
    result = result.model_copy(update={"hashes": hashes})
    report = json.dumps(result.to_json(), indent=2, allow_nan=False)
    (folder / REPORT_NAME).write_text(report + "\n", encoding="utf-8")
    return result


def _add_cards(
    job: ResumableJob, folder: Path, result: CalibrateResult, request: CalibrateRequest
) -> CalibrateResult:
    """Write the cards of the overlays and of the FP8 checkpoint."""
    of_run = CardJob(
        written=folder,
        target=job.folder,
        model=request.model,
        revision=request.revision,
        checked=result.checked,
    )
    cards = write_cards(of_run, job.recipe.formats)
    quantized, asked = result.quantize, job.recipe.quantize
    if asked is not None and isinstance(quantized, QuantizeResult):
        quantized = add_card(of_run, quantized, asked.folder)
        cards += [f"{asked.folder}/{CARD_NAME}"]
    files = tuple(sorted({*result.files, *cards}))
    return result.model_copy(update={"files": files, "quantize": quantized})


def _hash_files(job: ResumableJob, folder: Path, files: Sequence[str], known: Known) -> RunHashes:
    """Hash the files of the model, of the text and of what was written."""
    written = dict.fromkeys(name.partition("/")[0] for name in files if name != REPORT_NAME)
    return hash_run(
        None if job.is_live else job.source.folder,
        job.specs,
        {name: folder / name for name in written},
        known,
    )


def _check_written(
    job: ResumableJob, folder: Path, result: CalibrateResult
) -> tuple[WrittenCheck, ...]:
    """Look at the overlays and at the FP8 checkpoint, as `check` does."""
    found = check_formats(job.recipe.formats, folder, job.folder)
    asked = job.recipe.quantize
    if asked is None or not isinstance(result.quantize, QuantizeResult):
        return found
    checkpoint = check_written(
        folder / asked.folder,
        job.folder / asked.folder,
        path=asked.folder,
        plain_caches=asked.kv_cache_dtype_skip_layers,
    )
    return (*found, *checkpoint)


calibrate = as_function("calibrate", CalibrateRequest, run)
