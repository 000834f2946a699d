"""Write the scales of statistics in every requested format, with what belongs to MODEL."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.calibration.calibration_stats import STATS_NAME, CalibrationStats, save_stats
from fp8calib.checkpoint.atomic import output_folder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.export import ExportRequest, ExportResult
from fp8calib.commands.options import TP
from fp8calib.commands.recipe import Recipe
from fp8calib.commands.written import check_formats
from fp8calib.errors import ModelError, UsageError
from fp8calib.formats.dialect import NO_ATTACHMENT, Attachment
from fp8calib.formats.kv.json import RFC, name_rank_files
from fp8calib.formats.metadata import describe_attention, explain_other_attention
from fp8calib.formats.quantized_model import QuantizedModel, find_quantized
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.formats.write import check_export, check_replaced, list_outputs
from fp8calib.jobs.attachment import (
    describe_attachment,
    refuse_options,
    relate_to_quantized,
    require_server,
)
from fp8calib.jobs.card import CardJob, write_cards
from fp8calib.jobs.recipe_options import (
    QueryDecision,
    apply_request,
    decide_query,
    list_ignored,
    open_recipe,
    write_recipe,
)
from fp8calib.jobs.saved import saved_model, warn_of_tokenizer
from fp8calib.jobs.stats import GivenStats, join_stats, list_stats
from fp8calib.model.shapes import find_difference
from fp8calib.numerics.formats import FP8_FORMATS
from fp8calib.quantization.calibrated_scales import check_stats_model
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.int4 import is_int4_source


def export_scales(request: ExportRequest) -> ExportResult:
    """Write the scales of statistics in every requested format."""
    recipe = _choose_formats(request)
    model, out = request.model, Path(request.out)
    with ExitStack() as stack:
        place = None
        if model is not None:
            place = stack.enter_context(saved_model(model, out, request.tokenizer))
        given = join_stats(list_stats(request.stats))
        check_export(
            given.stats.geometry,
            recipe.formats,
            recipe.tp,
            FP8_FORMATS[recipe.scales.fp8_dtype],
        )
        query = decide_query(recipe, given.stats)
        target = _Target(source=None, stats=given.stats)
        if place is None:
            refuse_options(request)
        else:
            from fp8calib.model.load import find_folder  # imports transformers

            source = stack.enter_context(Checkpoint.open(find_folder(place, None)))
            target = _relate(request, recipe, given, source)
        result = _write(request, recipe, given, query, target)
    if model is None:
        return result
    more = warn_of_tokenizer(model, request.tokenizer, result.files)
    return result.model_copy(update={"warnings": (*result.warnings, *more)})


def _choose_formats(request: ExportRequest) -> Recipe:
    """Open the recipe, and apply the options."""
    recipe = open_recipe("kv" if request.recipe is None else str(request.recipe))
    if request.recipe is None:
        recipe = recipe.model_copy(update={"formats": ()})
    recipe = apply_request(recipe, request)
    if not recipe.formats and len(list_stats(request.stats)) == 1:
        raise UsageError(
            "export: --format is missing",
            hint=f"known formats: {', '.join(list_format_names())}",
        )
    for name in recipe.formats:
        find_dialect(name)  # refuses unknown ones
    if request.with_weights and RFC.name not in recipe.formats:
        raise UsageError(
            "--with-weights needs --format rfc",
            hint="add --format rfc, or write an FP8 checkpoint with `fp8calib quantize`",
        )
    if request.with_weights and request.model is None:
        raise UsageError("--with-weights needs --model", hint="pass the model to quantize")
    return recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The model that scales are written for."""

    source: Checkpoint | None
    """None without --model."""
    stats: CalibrationStats
    """For a quantized model, with its own names of tensors."""
    attachment: Attachment = NO_ATTACHMENT
    quantized: QuantizedModel | None = None


def _relate(
    request: ExportRequest, recipe: Recipe, given: GivenStats, source: Checkpoint
) -> _Target:
    """Refuse a model that does not fit the statistics.

    Raises:
        UsageError: options are of no use, or contradict the model.
        ModelError: it is another one.
    """
    stats = given.stats
    if request.with_weights and is_int4_source(source):
        overlays = [name for name in recipe.formats if find_dialect(name).needs_model]
        if overlays:
            raise UsageError(
                f"--format {overlays[0]}: an overlay needs the unquantized model, and the weights "
                f"of {source.folder} are int4",
                hint="export the overlay separately, with the unquantized --model",
            )
        return _Target(source=source, stats=stats)
    quantized = None if request.with_weights else find_quantized(source)
    if quantized is None:
        refuse_options(request)
        if request.with_weights:
            check_unquantized(source)
        check_stats_model(stats, source)
        attachment = Attachment(replaces_scales=request.replace_scales)
        return _Target(source=source, stats=stats, attachment=attachment)
    stats = _adopt_names(stats, source)
    attachment = relate_to_quantized(given.name, stats.origin, source, stats.geometry, request)
    return _Target(source=source, stats=stats, attachment=attachment, quantized=quantized)


def _adopt_names(stats: CalibrationStats, checkpoint: Checkpoint) -> CalibrationStats:
    """Give statistics the names that a quantized checkpoint of the same model has.

    Raises:
        ModelError: its config cannot be used, or it has another shape.
    """
    from fp8calib.model.geometry_from_config import read_geometry  # transformers

    geometry = read_geometry(checkpoint.folder, checkpoint.load_config())
    recorded = describe_attention(stats.geometry)
    difference = explain_other_attention(recorded, geometry)
    if difference := difference or find_difference(geometry, stats.geometry):
        raise ModelError(
            f"{checkpoint.folder} was not made from the model these statistics were calibrated on: "
            f"{difference}",
            hint="name a checkpoint that was quantized from the calibrated model",
        )
    return replace(stats, header=stats.header.model_copy(update={"geometry": geometry}))


def _write(
    request: ExportRequest,
    recipe: Recipe,
    given: GivenStats,
    query: QueryDecision,
    target: _Target,
) -> ExportResult:
    stats, source, out = target.stats, target.source, Path(request.out)
    weights, owned = None, list_outputs(recipe.formats, recipe.tp)
    joined = frozenset({STATS_NAME} if given.shards else ())
    if source is not None:
        check_replaced(recipe.formats, out, source)
    if request.with_weights:
        owned |= {name for tp in recipe.tp for name in name_rank_files(tp).values()}
    with output_folder(
        out,
        owned=owned | joined,
        force=request.force,
        inputs=[*given.inputs, *([source.folder] if source else [])],
    ) as folder:
        if joined:
            save_stats(given.stats, folder / STATS_NAME)
        if request.with_weights and source is not None:
            from fp8calib.quantization.rank_weights import prepare_weights  # imports transformers

            weights = prepare_weights(stats, source, recipe)
        written = write_recipe(
            recipe,
            stats,
            folder,
            source=source,
            query=query.is_written,
            quantized=None if weights is None else weights.tables,
            attachment=target.attachment,
        )
        for dialect in map(find_dialect, recipe.formats):
            if target.quantized is not None and dialect.needs_model:
                require_server(folder / dialect.path(), stats.geometry, target.quantized)
        checked = check_formats(recipe.formats, folder, out) if request.check else ()
        job = CardJob(written=folder, target=out, model=request.model or "", checked=checked)
        cards = write_cards(job, recipe.formats)
        more = (*cards, *(weights.write(folder) if weights else ()), *joined)
        files = sorted([*written.files, *more])
    return ExportResult(
        out=out,
        files=tuple(files),
        shards=given.shards,
        warnings=(
            *list_ignored(recipe, [TP.flags] if max(recipe.tp) > 1 else []),
            *query.notes,
            *(weights.notes if weights else ()),
            *(describe_attachment(target.attachment, source, stats.geometry) if source else ()),
            *map(str, written.notes),
        ),
        compared=target.attachment.compared,
        checked=checked,
    )
