"""Run a calibration: plan, calibrate, write, and make the result."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import TYPE_CHECKING, Any

import torch

from fp8calib.calibration.calibrate import run_calibration
from fp8calib.calibration.calibration_stats import RunStats, load_stats_file, save_stats
from fp8calib.calibration.job import CalibrationJob, ObserveText, RunModel
from fp8calib.calibration.journal import NAME_PREFIX
from fp8calib.calibration.origin import REPORT_NAME, STATS_NAME, spell_export
from fp8calib.calibration.processes import open_process_group
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.model_config import find_dtype
from fp8calib.checkpoint.output import (
    PROGRESS_NAME,
    check_output,
    explained,
    list_files,
    refuse_unknown_entries,
    remove_unfinished,
)
from fp8calib.checkpoint.overlay import list_overlay
from fp8calib.checkpoint.weight_index import SINGLE_FILE_NAME
from fp8calib.commands.calibrate import CalibrateRequest, CalibrateResult
from fp8calib.commands.check_written import finish_formats
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.hashes import hash_run
from fp8calib.commands.model import describe_run, open_run_model, plan_text, work_folder
from fp8calib.commands.model_folder import saved_model
from fp8calib.commands.recipe import (
    Quantize,
    Recipe,
    apply_request,
    check_query,
    decide_query,
    load_recipe,
)
from fp8calib.commands.request import Reporter, as_function
from fp8calib.commands.result import BeforeAfter, RunPlan, Saturation
from fp8calib.commands.stats import CalibrationStats
from fp8calib.data.sequences import parse_share
from fp8calib.errors import ExportError, ModelError, UsageError
from fp8calib.formats.compute import find_site_rules, write_formats
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.write import check_export, check_overlay_source, check_replaced, list_outputs
from fp8calib.machine import ALONE, ProcessRank
from fp8calib.model.device import choose_rank_device
from fp8calib.model.load import load_tokenizer
from fp8calib.numerics.formats import E4M3FN, FP8_FORMATS

if TYPE_CHECKING:  # most recipes quantize nothing
    from fp8calib.commands.quantize import QuantizeResult
    from fp8calib.quantization.select import Selection
    from fp8calib.quantization.settings import PlanSettings


def run(
    request: CalibrateRequest,
    reporter: Reporter,
    process_rank: ProcessRank = ALONE,
    *,
    make_engine: Callable[[RunModel, Recipe], tuple[str, ObserveText]] | None = None,
) -> CalibrateResult | RunPlan | None:
    """Calibrate a model; a dry run gives the plan, and other processes than the first one nothing.

    `make_engine` describes what runs the text in place of transformers, and gives what runs it.

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
    recipe, rows = apply_request(load_recipe(str(request.recipe)), request)
    out = None if request.out is None else Path(request.out)
    shard = None if request.shard is None else parse_share(request.shard)
    if shard is not None or out is None:
        # nothing is written, or nothing that needs the statistics of all shards
        recipe = recipe.model_copy(update={"formats": (), "quantize": None, "query_scale": False})
    device = choose_rank_device(request.device, process_rank, device_map=request.device_map)
    request = replace(request, device=device)
    with ExitStack() as stack:
        group = stack.enter_context(open_process_group(process_rank))
        # without a folder every process may have a part of the model, else each would write it
        opened = open_run_model(request, recipe=recipe, can_be_sharded=out is None)
        model = stack.enter_context(opened)
        needs_files = recipe.quantize or any(find_dialect(e).needs_model for e in recipe.formats)
        if model.is_live and needs_files and out is not None:
            saved = saved_model(request.model, out, request.tokenizer, warn=reporter.warn)
            checkpoint = Checkpoint.open(Path(stack.enter_context(saved)))
            model = replace(model, checkpoint=stack.enter_context(checkpoint))
        _check_formats(request, recipe, model)
        if out is not None:
            _check_outputs(request, recipe, model, out, reporter)
        text = None
        if recipe.observe.needs_forward:
            given = request.tokenizer
            text = plan_text(
                *(model.source, recipe.data), rows=rows, part="calibrate", tokenizer=given
            )
            if request.show_text is not None and group.is_first:
                given = given or load_tokenizer(model.source)
                for number, ids in enumerate(text.sequences[: request.show_text], 1):
                    shown = given.decode(ids, skip_special_tokens=False)
                    reporter.say(f"sequence {number}, {len(ids)} tokens: {shown}")
        elif shard is not None:
            raise UsageError(
                f"--shard: recipe {recipe.name} runs no data, so there is nothing to divide",
                hint="leave out --shard",
            )
        elif rows is not None or request.data:
            reporter.warn(f"recipe {recipe.name} measures weights alone: no text is read")
        engine, observe_text = ("", None) if make_engine is None else make_engine(model, recipe)
        job = CalibrationJob(
            model=model,
            observe=recipe.observe,
            recipe_name=recipe.name,
            plan=text,
            asked_batch_size=recipe.data.batch_size,
            shard=shard,
            out=out,
            group=group,
            engine=engine,
            observe_text=observe_text,
            progress=reporter,
        )
        for warning in (*model.list_warnings(), *(text.warnings if text else ())):
            reporter.warn(warning)
        result = _run(job, recipe, request, reporter)
        if isinstance(result, CalibrateResult) and not result.was_finished:
            for warning in result.warnings:
                if warning != result.failure:
                    reporter.warn(warning)
        return result


def _run(
    job: CalibrationJob,
    recipe: Recipe,
    request: CalibrateRequest,
    reporter: Reporter,
) -> CalibrateResult | RunPlan | None:
    group, model, out, finished = job.group, job.model, job.out, None
    # The first process alone looks for it: others may see what it writes now.
    if group.is_first and out is not None and request.resume:
        finished = _read_finished(job, recipe, out)
    if out is not None and group.broadcast(lambda: finished is not None):
        reporter.say(f"{out} is finished already")
        (out / PROGRESS_NAME).unlink(missing_ok=True)
        return finished
    if request.dry_run:
        writes = [] if out is None else sorted(_list_owned(recipe))
        more = {**job.count(), "out": str(out), "writes": writes}
        return describe_run(model, job.mode, job.plan, **more)
    rows = () if job.plan is None or job.plan.rows is None else job.plan.rows.describe()
    for text in (*rows, *job.mode.describe()) if out is not None else ():
        reporter.say(text)
    reporter.say(model.describe(job.engine))
    if group.size > 1:
        threads = torch.get_num_threads()
        reporter.say(f"{group.size} processes share the data, with {threads} threads each")
    if out is None:
        stats, cost = run_calibration(job)
        return _make_result(job, recipe, stats, cost) if group.is_first else None
    opened = work_folder(
        *(job, out, reporter),
        owned=_list_owned(recipe),
        resume=request.resume,
        force=request.force,
    )
    with opened as journal:
        folder = journal.folder
        if request.resume and group.size == 1 and not any(folder.glob(f"{NAME_PREFIX}*")):
            # an earlier run may have written all output there, and could not move it
            finished = _read_finished(job, recipe, folder)
        if finished is not None:
            reporter.say(f"{out} is finished already")
            return finished
        stats, cost = run_calibration(job, journal)
        if not group.is_first:
            return None
        remove_unfinished(folder, kept=NAME_PREFIX)
        save_stats(stats, folder / STATS_NAME)
        try:
            with explained(out):
                return _write_outputs(job, recipe, request, stats, cost, folder)
        except ExportError as error:  # hours of statistics are worth more than their formats
            failed = error
            remove_unfinished(folder, kept=NAME_PREFIX)
            save_stats(stats, folder / STATS_NAME)
    raise ExportError(
        failed.message,
        hint=f"the statistics are saved: {spell_export(out / STATS_NAME, model.name)} "
        "writes scales without another run",
    ) from failed


def _list_owned(recipe: Recipe) -> frozenset[str]:
    """Name the files and folders that a calibration writes in the output folder."""
    checkpoint = [recipe.quantize.folder] if recipe.quantize else []
    return list_outputs(recipe.formats, recipe.tp).union((STATS_NAME, REPORT_NAME), checkpoint)


def _looks_finished(recipe: Recipe, folder: Path) -> bool:
    """Whether a folder may hold the finished run that --resume continues."""
    return all((folder / name).exists() for name in _list_owned(recipe))


def _read_finished(job: CalibrationJob, recipe: Recipe, folder: Path) -> CalibrateResult | None:
    """Read the result from a folder that holds this run, finished; None if it does not."""
    if not _looks_finished(recipe, folder):
        return None
    try:
        stats = load_stats_file(folder / STATS_NAME, accepts_shard=True)
        report = json.loads((folder / REPORT_NAME).read_bytes())
        if report.get("quantize"):
            from fp8calib.commands.quantize import QuantizeResult  # few recipes quantize

            report["quantize"] = QuantizeResult.from_json(report["quantize"])
        result = CalibrateResult.from_json(
            {**report, "stats": CalibrationStats.of(stats), "was_finished": True}
        )
    except (ModelError, ValueError):
        return None
    asked, found = (each and (each.index, each.count) for each in (job.shard, stats.shard))
    is_other = asked != found or stats.header.explain_other(job.header)
    return None if is_other else result


# --- before the run -------------------------------------------------------------------------------


def _check_formats(request: CalibrateRequest, recipe: Recipe, model: RunModel) -> None:
    """Refuse formats whose scales are not observed, or that the model has no place for."""
    geometry, observe = model.prepared.geometry, recipe.observe
    modules = (attention.module for _, attention in geometry.attentions())
    excluded = [module for module in modules if module in model.prepared.ignored]
    missing = ""
    if recipe.formats and (excluded or not observe.kv):
        missing = f"K and V of {excluded[0]}" if excluded else "K and V"
    elif any(find_dialect(name).has_linears for name in recipe.formats):
        missing = "" if observe.inputs and observe.weights else "inputs and weights"
    elif recipe.query_scale is True and not observe.query:
        missing = "q"
    if missing:
        raise UsageError(
            f"{', '.join(recipe.formats) or '--query-scale'}: recipe {recipe.name} does not "
            f"observe {missing}",
            hint="choose another recipe, take it out of observe.ignore, or write `formats: []`",
        )
    check_query(recipe)
    find_site_rules(recipe.scales.rules, geometry)  # refuses unmatched patterns
    check_export(geometry, recipe.formats, recipe.tp, FP8_FORMATS[recipe.scales.fp8_dtype])
    check_overlay_source(
        *(geometry, recipe.formats, model.checkpoint.stored),
        replaces_scales=request.replace_scales,
    )


def _check_outputs(
    request: CalibrateRequest, recipe: Recipe, model: RunModel, out: Path, reporter: Reporter
) -> None:
    """Refuse an output folder that is in use, and a checkpoint that cannot be written."""
    if not (request.resume and _looks_finished(recipe, out)):
        try:
            check_output(out, _list_owned(recipe), request.force, inputs=[model.source.folder])
        except UsageError as error:
            if not request.dry_run:
                raise
            why = "; ".join(filter(None, (error.message, error.hint)))
            reporter.warn(f"the run itself would be refused: {why}")
    checkpoint = model.checkpoint
    check_replaced(recipe.formats, out, checkpoint.stored)
    if recipe.quantize is None:
        return
    folder = out / recipe.quantize.folder
    if folder.is_dir():
        known = {file.path.name for file in checkpoint.files} | {SINGLE_FILE_NAME}
        known |= list_overlay(checkpoint.stored)
        refuse_unknown_entries(folder, {path.name for path in folder.iterdir()} - known)
    try:
        _select(recipe, checkpoint, recipe.quantize.make_settings())
    except (ModelError, ExportError) as error:
        hint = "use a recipe without `quantize`, such as kv, to have the statistics and scales"
        what = f"{folder.name} cannot be written: {error.message}"
        raise ExportError(what, hint=hint) from error


def _select(recipe: Recipe, checkpoint: Checkpoint, settings: PlanSettings) -> Selection:
    """Choose the linears that a recipe quantizes."""
    from fp8calib.quantization.plan import select_linears
    from fp8calib.quantization.select import check_unquantized

    if (fp8_dtype := recipe.scales.fp8_dtype) != E4M3FN.name:
        raise ExportError(f"FP8 checkpoints hold {E4M3FN.name}, not {fp8_dtype}")
    check_unquantized(checkpoint.stored)
    return select_linears(checkpoint, settings)


# --- after the run -------------------------------------------------------------------------------


def _write_outputs(
    job: CalibrationJob,
    recipe: Recipe,
    request: CalibrateRequest,
    stats: RunStats,
    cost: Mapping[str, Any],
    folder: Path,
) -> CalibrateResult:
    """Write what is made of the statistics, the report last."""
    assert job.out is not None  # noqa: S101 -- `folder` becomes it
    notes = write_formats(
        *(stats, recipe.formats, folder),
        fmt=FP8_FORMATS[recipe.scales.fp8_dtype],
        tps=recipe.tp,
        source=job.model.checkpoint.stored,
        query=decide_query(recipe, stats)[0],
        rules=recipe.scales.choice,
        attachment=Attachment(replaces_scales=request.replace_scales),
    )
    checked = finish_formats(
        *(recipe.formats, folder, job.out, request.model),
        revision=request.revision,
        check=request.check,
    )
    warnings, failure = [], ""
    checkpoint = None
    if recipe.quantize is not None:
        try:
            checkpoint = _quantize(job, recipe, recipe.quantize, request, stats, folder)
        except (ModelError, ExportError) as error:  # statistics and scales of a long run are kept
            why = "; ".join(filter(None, (error.message, error.hint)))
            failure = f"{recipe.quantize.folder} is not written: {why}"
            warnings = [failure]
    if checkpoint is not None:
        name = checkpoint.out.name
        warnings = [f"{name}: {e}" for e in (*checkpoint.notes, *map(str, checkpoint.dead))]
        checked = (*checked, *checkpoint.checked)
        checkpoint = checkpoint.model_copy(update={"checked": ()})
    work = (NAME_PREFIX, PROGRESS_NAME)
    files = [name for name in list_files(folder) if not name.startswith(work)]
    places = dict.fromkeys(name.partition("/")[0] for name in files)
    result = _make_result(
        *(job, recipe, stats, cost),
        files=tuple(sorted([*files, REPORT_NAME])),
        warnings=(*notes, *warnings, *_list_overflows(job, stats)),
        checked=checked,
        quantize=checkpoint,
        failure=failure,
        hashes=hash_run(
            None if job.model.is_live else job.model.source.folder,
            recipe.data.sources if job.plan else (),
            {name: folder / name for name in places},
        ),
    )
    report = json.dumps(result.to_json(), indent=2, allow_nan=False)
    (folder / REPORT_NAME).write_text(report + "\n", encoding="utf-8")
    return result


def _list_overflows(job: CalibrationJob, stats: RunStats) -> Iterator[str]:
    """Name the largest tensor that float16 cannot hold, if config.json has a model served in it."""
    if find_dtype(job.model.checkpoint.load_config()) != "float16":
        return
    amax = {s: float(e.amax.max()) for s, e in stats.sites.items() if e.amax.numel()}
    site = max(amax, key=amax.__getitem__, default=None)
    largest = torch.finfo(torch.float16).max
    if site is not None and amax[site] > largest:
        yield (
            f"{site} reaches {amax[site]:,.0f}, and float16, the dtype in config.json, ends at "
            f"{largest:,.0f}: serve the model with --dtype bfloat16"
        )


def _quantize(
    job: CalibrationJob,
    recipe: Recipe,
    asked: Quantize,
    request: CalibrateRequest,
    stats: RunStats,
    folder: Path,
) -> QuantizeResult:
    """Write the recipe's checkpoint under `folder`, with its card."""
    from fp8calib.commands.quantize import finish_quantized
    from fp8calib.quantization.calibrated_scales import find_scales, list_unmeasured, split_static
    from fp8calib.quantization.plan import make_plan
    from fp8calib.quantization.select import find_selection
    from fp8calib.quantization.write import write_checkpoint

    started = time.monotonic()
    settings, checkpoint = asked.make_settings(), job.model.checkpoint
    selection = _select(recipe, checkpoint, settings)
    unmeasured = list_unmeasured(stats, *split_static(settings, selection))
    if unmeasured:
        settings = replace(settings, ignore=(*settings.ignore, *unmeasured))
        selection = find_selection(checkpoint, ignore=settings.ignore).require()
    scales = find_scales(stats, checkpoint, settings, selection, recipe.scales.choice)
    # notes on scales are in the report already
    plan = make_plan(checkpoint, settings, selection, scales=replace(scales, notes=()))
    job.progress.stage("quantizing", plan.data_bytes, unit="bytes")
    written = write_checkpoint(
        *(checkpoint, plan, folder / asked.folder),
        device=torch.device("cpu"),
        advance=job.progress.advance,
    )
    return finish_quantized(
        *(request, checkpoint, plan, written),
        folder=folder,
        target=job.out,
        path=asked.folder,
        started=started,
        geometry=stats.geometry,
        notes=[
            f"{module}: left unquantized: outside the decoder layers inputs are not observed"
            for module in unmeasured
        ],
    )


def _make_result(
    job: CalibrationJob,
    recipe: Recipe,
    stats: RunStats,
    cost: Mapping[str, Any],
    *,
    files: tuple[str, ...] = (),
    warnings: Sequence[str] = (),
    **written: Any,
) -> CalibrateResult:
    """Make the result; `cost` is what the run gave, and `written` has the rest of the fields."""
    model, text, shard, header = job.model, job.plan, job.shard, stats.header
    expert_tokens = {
        name.removesuffix(".up_proj"): tokens for name, tokens in stats.expert_counts.items()
    }
    return CalibrateResult(
        stats=CalibrationStats.of(stats),
        model=model.name,
        command=spell_command(),
        recipe=recipe.name,
        data=text.sources if text else (),
        seq_len=text.seq_len if text else None,
        rows=asdict(text.rows) if text and text.rows else None,
        measured_quantized=model.checkpoint.form,
        architecture=stats.geometry.architecture,
        out=job.out,
        files=files,
        shard=None if shard is None else {"index": shard.index, "count": shard.count},
        **cost,
        dtype=model.dtype,
        dtype_why=model.dtype_why,
        device=model.device,
        engine=header.engine,
        batch_size=job.batch_size,
        rule=str(recipe.scales.rule),
        rules={pattern: str(rule) for pattern, rule in recipe.scales.rules.items()} or None,
        coverage={"observed": len(stats.sites), "skipped": header.skipped},
        saturation=Saturation.of(stats),
        expert_tokens=expert_tokens,
        kv_bytes_per_token=BeforeAfter.of_kv_cache(stats.geometry),
        warnings=(
            *model.list_warnings(),
            *(text.warnings if text else ()),
            *decide_query(recipe, stats)[1],
            *warnings,
        ),
        versions={**header.versions, "python": python_version()},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        model_hash=header.model_fingerprint,
        data_hash=header.data_fingerprint,
        **written,
    )


calibrate = as_function("calibrate", CalibrateRequest, run)
