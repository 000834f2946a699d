"""Run calibration text through a model: plan, calibrate, write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fp8calib.calibration.calibrate import TextEngine
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.processes import ProcessGroup, open_process_group
from fp8calib.calibration.run_model import RunModel
from fp8calib.checkpoint.atomic import check_output, refuse_unknown_entries
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.overlay import CARD_NAME, find_side_files
from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.commands.calibrate import CalibrateRequest, CalibrateResult
from fp8calib.commands.calibrated import make_calibrate_result, write_outputs
from fp8calib.commands.function import Reporter, as_function
from fp8calib.commands.hashes import hashing
from fp8calib.commands.job import CalibrationJob
from fp8calib.commands.model import open_run_model, plan_text
from fp8calib.commands.options import TP
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.recipe_options import (
    apply_request,
    check_query,
    list_given,
    list_ignored,
    open_recipe,
    resolve_text,
)
from fp8calib.commands.run_plan import RunPlan
from fp8calib.commands.saved import saved_model, warn_of_tokenizer
from fp8calib.commands.work_folder import find_finished, looks_finished, work_folder
from fp8calib.data.rows import ReadRow
from fp8calib.data.shares import parse_share
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.formats.compute import find_site_rules
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.write import check_export, check_overlay_source, check_replaced
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.model.device import choose_rank_device
from fp8calib.model.load import load_tokenizer
from fp8calib.model.prepared import PreparedModel
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.quantization.settings import make_settings


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
    asked = apply_request(open_recipe(str(request.recipe)), request)
    recipe, rows = resolve_text(asked, request.data)
    if request.out is None and request.formats:
        reporter.warn("--format has no effect: nothing is written without --out")
    elif request.shard is not None and request.formats:
        reporter.warn("--format has no effect on a shard: `fp8calib export` of all shards takes it")
    if request.shard is not None or request.out is None:
        # nothing is written, or nothing that needs the statistics of all shards
        recipe = recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})
    given = (name for name in list_given(request) if request.out is not None or name != TP.flags)
    for text in list_ignored(recipe, list(given)):
        reporter.warn(text)
    device = choose_rank_device(request.device, process_rank, device_map=request.device_map)
    request = replace(request, device=device)
    with (
        open_process_group(process_rank) as group,
        _open_job(request, recipe, rows, reporter, group, make_engine) as job,
    ):
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
    header = job.make_header()
    # The first process alone looks for it: others may see what it writes now.
    finished = find_finished(job, header) if job.group.is_first else None
    if job.group.broadcast(lambda: finished is not None):
        return _tell_finished(job, finished)
    mode = job.choose_mode()
    if request.dry_run:
        return make_run_plan(job, mode)
    if job.out is None:
        stats, cost = job.run(mode, header, None)
        return make_calibrate_result(job, stats, cost) if job.group.is_first else None
    rows = () if job.plan is None or job.plan.rows is None else job.plan.rows.describe()
    for text in (*rows, *mode.describe()):
        job.reporter.say(text)
    model = job.model
    hashed = None if model.is_live or not job.group.is_first else model.source.folder
    with work_folder(job, header) as journal, hashing(hashed, model.device) as find_known:
        if isinstance(journal, CalibrateResult):
            return _tell_finished(job, journal)
        stats, cost = job.run(mode, header, journal)
        if not job.group.is_first:
            return None
        return write_outputs(job, stats, cost, journal.folder, request, find_known)


def _tell_finished(job: CalibrationJob, finished: CalibrateResult | None) -> CalibrateResult | None:
    if finished is not None:
        job.reporter.say(f"{job.out} is finished already")
    return finished


# --- before the run -------------------------------------------------------------------------------


@contextmanager
def _open_job(
    request: CalibrateRequest,
    recipe: Recipe,
    rows: Iterable[ReadRow] | None,
    reporter: Reporter,
    group: ProcessGroup,
    make_engine: Callable[[CalibrationJob], TextEngine] | None,
) -> Iterator[CalibrationJob]:
    _check_observed(recipe)
    shard = None if request.shard is None else parse_share(request.shard)
    with (
        open_run_model(
            request,
            recipe=recipe,
            can_be_sharded=request.out is None,  # every process would write
        ) as opened,
        ExitStack() as stack,
    ):
        model = _give_files(opened, request, recipe, stack)
        geometry = model.prepared.geometry
        check_query(recipe)
        _check_excluded(recipe, model.prepared)
        find_site_rules(recipe.scales.rules, geometry)  # refuses unmatched patterns
        check_export(geometry, recipe.formats, recipe.tp, FP8_FORMATS[recipe.scales.fp8_dtype])
        check_overlay_source(
            *(geometry, recipe.formats, model.checkpoint.stored),
            replaces_scales=request.replace_scales,
        )
        asked = recipe.quantize
        job = CalibrationJob(
            model=model,
            resume=request.resume,
            force=request.force,
            reporter=reporter,
            group=group,
            recipe=recipe,
            shard=shard,
            out=None if request.out is None else Path(request.out),
            quantization=None
            if asked is None
            else make_settings(asked.scheme, asked.layer_schemes, asked.ignore),
        )
        if make_engine is not None:
            job = replace(job, engine=make_engine(job))
        if job.out is not None:
            _check_outputs(job, dry_run=request.dry_run)
        if recipe.observe.needs_forward:
            text = plan_text(
                *(model.source, recipe.data),
                rows=rows,
                part="calibrate",
                tokenizer=request.tokenizer,
            )
            job = replace(job, plan=text, specs=recipe.data.sources if rows is None else ())
            if request.show_text is not None and group.is_first:
                tokenizer = request.tokenizer or load_tokenizer(model.source)
                for number, ids in enumerate(text.sequences[: request.show_text], 1):
                    shown = tokenizer.decode(ids, skip_special_tokens=False)
                    reporter.say(f"sequence {number}, {len(ids)} tokens: {shown}")
        elif shard is not None:
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


def _check_outputs(job: CalibrationJob, *, dry_run: bool) -> None:
    """Refuse an output folder that is in use, and a checkpoint that cannot be written."""
    if not dry_run and not looks_finished(job, job.out):
        check_output(job.folder, job.owned, job.force, inputs=[job.model.source.folder])
    checkpoint, asked = job.model.checkpoint, job.recipe.quantize
    check_replaced(job.recipe.formats, job.folder, checkpoint.stored)
    if asked is None or job.quantization is None:
        return
    folder = job.folder / asked.folder
    known = {path.name for path in checkpoint.weight_files}
    known |= {name.split("/")[0] for name in find_side_files(checkpoint)[0]}
    known |= {SINGLE_FILE_NAME, INDEX_NAME, CONFIG_NAME, CARD_NAME}
    found = {path.name for path in folder.iterdir()} if folder.is_dir() else set[str]()
    refuse_unknown_entries(folder, found - known)
    try:
        job.select_matrices(job.quantization)
    except (ModelError, ExportError) as error:
        hint = "use a recipe without `quantize`, such as kv, to have the statistics and scales"
        what = f"{asked.folder} cannot be written: {error.message}"
        raise ExportError(what, hint=hint) from error


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


def make_run_plan(job: CalibrationJob, mode: MemoryPlan, **more: Any) -> RunPlan:
    """Describe the planned run; `more` is added to it, or replaces what it has."""
    text, model = job.plan, job.model
    described = {
        "model": model.name,
        "architecture": model.prepared.geometry.architecture,
        "layers": len(model.prepared.geometry.layers),
        "weights_size_bytes": model.checkpoint.total_size_bytes,
        "dtype": model.dtype,
        "dtype_why": model.dtype_why,
        "device": model.device,
        **job.count(),
        "data": list(text.sources) if text else [],
        "rows": text.rows.to_json() if text and text.rows else None,
        "out": str(job.out),
        "writes": sorted(job.owned),
        **mode.as_json(),
        **more,
    }
    rows = text.rows.describe() if text and text.rows else ()
    return RunPlan(plan=described, text=tuple(rows))


calibrate = as_function("calibrate", CalibrateRequest, run)
