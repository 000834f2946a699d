"""Write the scales of statistics in any format."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.atomic import output_folder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.written import check_formats
from fp8calib.dialects.kv.rfc import RFC, name_rank_files
from fp8calib.dialects.registry import find_dialect, list_format_names
from fp8calib.dialects.write import check_export, check_replaced, list_outputs, write_formats
from fp8calib.errors import UsageError
from fp8calib.jobs.card import CardJob, write_cards
from fp8calib.jobs.export.attachment import require_server
from fp8calib.jobs.export.target import ExportTarget, ExportTask, open_target
from fp8calib.jobs.function import as_function
from fp8calib.jobs.recipe_options import apply_request, decide_query, list_ignored, open_recipe
from fp8calib.jobs.reporter import Reporter
from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
from fp8calib.jobs.stats import join_stats, list_stats
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.options.recipe_keys import TP
from fp8calib.requests.export import ExportRequest
from fp8calib.results.export import ExportResult
from fp8calib.results.written import WrittenCheck
from fp8calib.stats.calibration_stats import STATS_NAME, CalibrationStats, save_stats

if TYPE_CHECKING:
    from fp8calib.jobs.export.rank_weights import RankWeights


def run(request: ExportRequest, reporter: Reporter) -> ExportResult:
    """Write the scales of statistics in every requested format; no model runs.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        RecipeError: the recipe is invalid, or a pattern of it matches nothing.
        ModelError: the statistics are damaged, or not all shards of one run; or the model cannot be
            read, or is another one.
        ExportError: a scale cannot be computed, or a format not written.
    """
    made = open_recipe("kv" if request.recipe is None else str(request.recipe))
    if request.recipe is None:
        made = made.model_copy(update={"formats": ()})
    recipe = apply_request(made, request)
    if not recipe.formats and len(list_stats(request.stats)) == 1:
        raise UsageError(
            "export: --format is missing",
            hint=f"known formats: {', '.join(list_format_names())}",
        )
    for name in recipe.formats:
        find_dialect(name)  # refuses unknown ones
    model = request.model
    with ExitStack() as stack:
        place = (
            None
            if model is None
            else stack.enter_context(saved_model(model, Path(request.out), request.tokenizer))
        )
        task = ExportTask(request=request, recipe=recipe, model=place)
        _check_weights(task)
        result = _export(task)
    more = () if model is None else warn_of_tokenizer(model, request.tokenizer, result.files)
    result = result.model_copy(update={"warnings": (*result.warnings, *more)})
    for text in result.warnings:
        reporter.warn(text)
    return result


def _export(task: ExportTask) -> ExportResult:
    request, recipe = task.request, task.recipe
    given = join_stats(list_stats(request.stats))
    stats, joined = given.stats, frozenset({STATS_NAME} if given.shards else ())
    fmt = FP8_FORMATS[recipe.scales.fp8_dtype]
    check_export(stats.geometry, recipe.formats, recipe.tp, fmt)
    query = decide_query(recipe, stats)
    with open_target(task, given) as target:
        source, stats, attachment = target.source, target.stats, target.attachment
        if source is not None:
            check_replaced(recipe.formats, task.out, source)
        with output_folder(
            task.out,
            owned=list_outputs(recipe.formats, recipe.tp) | _list_other_files(task) | joined,
            force=request.force,
            inputs=[*given.inputs, *([source.folder] if source else [])],
        ) as folder:
            if joined:
                save_stats(given.stats, folder / STATS_NAME)
            weights = _prepare_weights(task, stats, source)
            written = write_formats(
                stats,
                recipe.formats,
                folder,
                fmt=fmt,
                tps=recipe.tp,
                source=source,
                query=query.is_written,
                fallback=recipe.scales.fallback,
                rule=recipe.scales.rule,
                rules=recipe.scales.rules,
                quantized=None if weights is None else weights.tables,
                attachment=attachment,
            )
            checked = _check_written(task, target, folder)
            job = CardJob(
                written=folder, target=task.out, model=request.model or "", checked=checked
            )
            cards = write_cards(job, recipe.formats)
            more = (*cards, *(weights.write(folder) if weights else ()), *joined)
            files = sorted([*written.files, *more])
        return ExportResult(
            out=task.out,
            files=tuple(files),
            shards=given.shards,
            warnings=(
                *list_ignored(recipe, [TP.flags] if max(recipe.tp) > 1 else []),
                *query.notes,
                *(weights.notes if weights else ()),
                *target.describe(),
                *map(str, written.notes),
            ),
            compared=attachment.compared,
            checked=checked,
        )


def _check_written(
    task: ExportTask, target: ExportTarget, folder: Path
) -> tuple[WrittenCheck, ...]:
    """Look at the written overlays, as `check` does.

    Raises:
        ExportError: no server uses the overlay of a quantized model.
    """
    for dialect in map(find_dialect, task.recipe.formats):
        if target.quantized is not None and dialect.needs_model:
            require_server(folder / dialect.path(), target.stats.geometry, target.quantized)
    if not task.request.check:
        return ()
    return check_formats(task.recipe.formats, folder, task.out)


def _check_weights(task: ExportTask) -> None:
    if task.request.with_weights and RFC.name not in task.recipe.formats:
        raise UsageError(
            "--with-weights needs --format rfc",
            hint="add --format rfc, or write an FP8 checkpoint with `fp8calib quantize`",
        )
    if task.request.with_weights and task.model is None:
        raise UsageError("--with-weights needs --model", hint="pass the model to quantize")


def _list_other_files(task: ExportTask) -> frozenset[str]:
    if not task.request.with_weights:
        return frozenset()
    names = (name for tp in task.recipe.tp for name in name_rank_files(tp).values())
    return frozenset(names)


def _prepare_weights(
    task: ExportTask, stats: CalibrationStats, source: Checkpoint | None
) -> RankWeights | None:
    if not task.request.with_weights or source is None:
        return None
    from fp8calib.jobs.export.rank_weights import prepare_weights

    return prepare_weights(stats, source, task.recipe)


export = as_function("export", ExportRequest, run)
