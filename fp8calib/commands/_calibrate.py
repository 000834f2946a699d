"""Run calibration text through a model: plan, calibrate, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from fp8calib.calibration.calibrate import TextEngine
from fp8calib.calibration.processes import ProcessGroup, open_process_group
from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.output import check_output, refuse_unknown_entries, remove_progress_file
from fp8calib.checkpoint.overlay import CARD_NAME, find_side_files
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.commands.calibrate import CalibrateRequest, CalibrateResult
from fp8calib.commands.calibrated import keeping_statistics, make_calibrate_result, write_outputs
from fp8calib.commands.function import Reporter, as_function
from fp8calib.commands.hashes import hashing
from fp8calib.commands.job import CalibrationJob, looks_finished, read_finished, work_folder
from fp8calib.commands.model import open_run_model, plan_text
from fp8calib.commands.recipe import Recipe, load_recipe
from fp8calib.commands.recipe_options import (
    apply_request,
    check_query,
    list_ignored,
    resolve_text,
)
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.saved import saved_model, warn_of_tokenizer
from fp8calib.data.rows import ReadRow
from fp8calib.data.shares import parse_share
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.formats.compute import find_site_rules
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.write import check_export, check_overlay_source, check_replaced
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.model.device import choose_rank_device
from fp8calib.model.load import load_tokenizer
from fp8calib.numerics.formats import FP8_FORMATS


def run(
    request: CalibrateRequest,
    reporter: Reporter,
    process_rank: ProcessRank = ALONE,
    *,
    make_engine: Callable[[CalibrationJob], TextEngine] | None = None,
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
    asked = apply_request(load_recipe(str(request.recipe)), request)
    recipe, rows = resolve_text(asked, request.data)
    if request.out is None and request.formats:
        reporter.warn("--format has no effect: nothing is written without --out")
    elif request.shard is not None and request.formats:
        reporter.warn("--format has no effect on a shard: `fp8calib export` of all shards takes it")
    if request.shard is not None or request.out is None:
        # nothing is written, or nothing that needs the statistics of all shards
        recipe = recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})
    for text in list_ignored(recipe, request):
        reporter.warn(text)
    _check_observed(recipe)
    device = choose_rank_device(request.device, process_rank, device_map=request.device_map)
    request = replace(request, device=device)
    with (
        open_process_group(process_rank) as group,
        open_run_model(
            request,
            recipe=recipe,
            can_be_sharded=request.out is None,  # every process would write
        ) as opened,
        _with_files(opened, request, recipe) as model,
    ):
        job = _make_job(request, recipe, model, reporter, group)
        if make_engine is not None:
            job = replace(job, engine=make_engine(job))
        if job.out is not None:
            _check_outputs(job, dry_run=request.dry_run)
        job = _read_text(job, request, rows)
        told = dict.fromkeys(job.plan.warnings if job.plan else ())
        for text in told:
            reporter.warn(text)
        result = _run(job, request)
        if isinstance(result, CalibrateResult) and not result.was_finished:
            missing = warn_of_tokenizer(request.model, request.tokenizer, result.files)
            for text in dict.fromkeys((*result.warnings, *missing)):
                if text not in (*told, result.failure):
                    reporter.warn(text)
        return result


def _run(job: CalibrationJob, request: CalibrateRequest) -> CalibrateResult | RunPlan | None:
    header, group, finished = job.make_header(), job.group, None
    # The first process alone looks for it: others may see what it writes now.
    if group.is_first and job.out is not None and looks_finished(job, job.out):
        finished = read_finished(job, header, job.out)
        if finished is None:
            check_output(job.out, job.owned, job.force, inputs=[job.model.source.folder])
        else:
            remove_progress_file(job.out)
            job.reporter.say(f"{job.out} is finished already")
    if group.broadcast(lambda: finished is not None):
        return finished
    mode = job.choose_mode()
    if request.dry_run:
        return job.describe_plan(mode)
    if job.out is None:
        stats, cost = job.run(mode, header, None)
        return make_calibrate_result(job, stats, cost) if group.is_first else None
    rows = () if job.plan is None or job.plan.rows is None else job.plan.rows.describe()
    for text in (*rows, *mode.describe()):
        job.reporter.say(text)
    model = job.model
    hashed = None if model.is_live or not group.is_first else model.source.folder
    with work_folder(job, header) as journal, hashing(hashed, model.device) as find_known:
        if isinstance(journal, CalibrateResult):
            job.reporter.say(f"{job.out} is finished already")
            return journal
        stats, cost = job.run(mode, header, journal)
        if not group.is_first:
            return None
        with keeping_statistics(job, stats, journal.folder):
            return write_outputs(job, request, stats, cost, journal.folder, find_known)


# --- before the run -------------------------------------------------------------------------------


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


@contextmanager
def _with_files(model: RunModel, request: CalibrateRequest, recipe: Recipe) -> Iterator[RunModel]:
    """Give a model in memory the files that an overlay or FP8 checkpoint of it is made from."""
    needs_files = recipe.quantize is not None or any(
        find_dialect(name).needs_model for name in recipe.formats
    )
    if not model.is_live or not needs_files or request.out is None:
        yield model
        return
    with (
        saved_model(request.model, Path(request.out), request.tokenizer) as folder,
        Checkpoint.open(Path(folder)) as checkpoint,
    ):
        yield replace(model, checkpoint=checkpoint)


def _make_job(
    request: CalibrateRequest,
    recipe: Recipe,
    model: RunModel,
    reporter: Reporter,
    group: ProcessGroup,
) -> CalibrationJob:
    """Make the job, after refusing formats whose scales the model has no place for."""
    geometry = model.prepared.geometry
    check_query(recipe)
    modules = (attention.module for _, attention in geometry.attentions())
    excluded = next((module for module in modules if module in model.prepared.ignored), None)
    if recipe.formats and excluded is not None:
        raise UsageError(
            f"{', '.join(recipe.formats)}: needs K and V of {excluded}, which recipe "
            f"{recipe.name} excludes",
            hint="take it out of observe.ignore, or write `formats: []`",
        )
    find_site_rules(recipe.scales.rules, geometry)  # refuses unmatched patterns
    check_export(geometry, recipe.formats, recipe.tp, FP8_FORMATS[recipe.scales.fp8_dtype])
    check_overlay_source(
        *(geometry, recipe.formats, model.checkpoint.stored),
        replaces_scales=request.replace_scales,
    )
    return CalibrationJob(
        model=model,
        resume=request.resume,
        force=request.force,
        reporter=reporter,
        group=group,
        recipe=recipe,
        shard=None if request.shard is None else parse_share(request.shard),
        out=None if request.out is None else Path(request.out),
    )


def _check_outputs(job: CalibrationJob, *, dry_run: bool) -> None:
    """Refuse an output folder that is in use, and a checkpoint that cannot be written."""
    if not dry_run and not looks_finished(job, job.folder):
        check_output(job.folder, job.owned, job.force, inputs=[job.model.source.folder])
    checkpoint, settings = job.model.checkpoint, job.quantization
    check_replaced(job.recipe.formats, job.folder, checkpoint.stored)
    if job.recipe.quantize is None or settings is None:
        return
    folder = job.folder / job.recipe.quantize.folder
    known = {path.name for path in checkpoint.weight_files}
    known |= {name.split("/")[0] for name in find_side_files(checkpoint)[0]}
    known |= {SINGLE_FILE_NAME, INDEX_NAME, CONFIG_NAME, CARD_NAME}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    refuse_unknown_entries(folder, found - known)
    try:
        job.select_matrices(settings)
    except (ModelError, ExportError) as error:
        hint = "use a recipe without `quantize`, such as kv, to have the statistics and scales"
        what = f"{folder.name} cannot be written: {error.message}"
        raise ExportError(what, hint=hint) from error


def _read_text(
    job: CalibrationJob, request: CalibrateRequest, rows: Iterable[ReadRow] | None
) -> CalibrationJob:
    """Plan the text of a job that runs some, and print the first of it where that is asked for."""
    source, recipe, tokenizer = job.model.source, job.recipe, request.tokenizer
    if recipe.observe.needs_forward:
        text = plan_text(source, recipe.data, rows=rows, part="calibrate", tokenizer=tokenizer)
        job = replace(job, plan=text, specs=recipe.data.sources if rows is None else ())
        if request.show_text is not None and job.group.is_first:
            tokenizer = tokenizer or load_tokenizer(source)
            for number, ids in enumerate(text.sequences[: request.show_text], 1):
                shown = tokenizer.decode(ids, skip_special_tokens=False)
                job.reporter.say(f"sequence {number}, {len(ids)} tokens: {shown}")
    elif job.shard is not None:
        raise UsageError(
            f"--shard: recipe {recipe.name} runs no data, so there is nothing to divide",
            hint="leave out --shard",
        )
    job.list_batches()  # refuses a shard without any
    return job


calibrate = as_function("calibrate", CalibrateRequest, run)
