"""Run `fp8calib export`: load statistics, check, write, print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.console import list_top_level, print_json, print_text, warn
from fp8calib.cli.export.settings import ExportSettings
from fp8calib.cli.graft import (
    GraftOptions,
    describe_graft,
    relate_to_quantized,
    require_server,
)
from fp8calib.cli.option_types import split_names
from fp8calib.cli.recipe_options import decide_query, override_recipe
from fp8calib.cli.serving import describe_serving
from fp8calib.dialects.dialect import NO_GRAFT, Graft
from fp8calib.dialects.graft import QuantizedModel, find_quantized
from fp8calib.dialects.kv.rfc import RFC, name_rank_files
from fp8calib.dialects.metadata import describe_attention, explain_other_attention
from fp8calib.dialects.registry import find_dialect, list_format_names
from fp8calib.dialects.write import check_export, check_replaced, list_outputs, write_formats
from fp8calib.engines.serving import find_scale_serving
from fp8calib.errors import ModelError, UsageError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.geometry.model_geometry import find_difference
from fp8calib.quantization.calibrated_scales import check_stats_model
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.int4 import is_int4_source
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_stats import CalibrationStats, load_stats

if TYPE_CHECKING:
    from fp8calib.cli.export.rank_weights import RankWeights


def run_export(settings: ExportSettings) -> None:
    """Write every requested format from statistics alone."""
    recipe = _resolve_recipe(settings)
    for name in recipe.formats:
        find_dialect(name)  # refuses unknown ones
    _check_weights(settings, recipe)
    stats = load_stats(settings.stats)
    fmt = FP8_FORMATS[recipe.scales.fp8_dtype]
    check_export(stats.geometry, recipe.formats, recipe.tp, fmt)
    query = decide_query(recipe, stats)
    with _open_source(settings, recipe, stats) as target:
        source, stats, graft = target.source, target.stats, target.graft
        if source is not None:
            check_replaced(recipe.formats, settings.out, source)
        inputs = [settings.stats, *([source.folder] if source else [])]
        with OutputFolder(
            settings.out,
            owned=list_outputs(recipe.formats, recipe.tp) | _list_weight_files(settings, recipe.tp),
            force=settings.force,
            inputs=inputs,
        ) as folder:
            weights = _prepare_weights(settings, recipe, stats, source)
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
                quantized=None if weights is None else weights.tables,
                graft=graft,
            )
            served = _find_serving(settings, recipe, target, folder)
            files = sorted([*written.files, *(weights.write(folder) if weights else ())])
    notes = [
        *query.notes,
        *(weights.notes if weights else ()),
        *target.describe(),
        *map(str, written.notes),
    ]
    for note in notes:
        warn(note)
    if settings.as_json:
        report = {"out": str(settings.out), "files": files, "warnings": notes}
        print_json({**report, **(served or {})})
        return
    print_text(f"written to {settings.out}: {list_top_level(files)}")
    for text in describe_serving(served) if served else ():
        print_text(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Target:
    """The model that scales are written for."""

    source: Checkpoint | None
    """None without --model."""
    stats: CalibrationStats
    """For a quantized model, with its own names of tensors."""
    graft: Graft = NO_GRAFT
    quantized: QuantizedModel | None = None

    def describe(self) -> Iterator[str]:
        """Describe what a user should know about a quantized model."""
        if self.source is not None and self.quantized is not None:
            yield from describe_graft(self.graft, self.source, self.stats.geometry)


def _find_serving(
    settings: ExportSettings, recipe: Recipe, target: _Target, folder: Path
) -> dict[str, Any] | None:
    """Find who serves the overlays of a quantized model; None where there are none.

    Raises:
        ExportError: no server uses the scales of one.
    """
    dialects = [dialect for dialect in map(find_dialect, recipe.formats) if dialect.needs_model]
    if target.source is None or target.quantized is None or not dialects:
        return None
    report: dict[str, Any] = {"serving": [], "limitations": [], "other_engines": []}
    for dialect in dialects:
        written, geometry = folder / dialect.path(), target.stats.geometry
        require_server(written, geometry, target.quantized)
        serving = find_scale_serving(
            written,
            settings.out / dialect.path(),
            geometry,
            model=target.source.folder,
            model_name=str(settings.model),
            tp=1,
        )
        items: tuple[tuple[Any, ...], ...] = (
            serving.commands,
            serving.limitations,
            serving.others,
        )
        for key, found in zip(report, items, strict=True):
            report[key] += [{"format": dialect.name, **asdict(item)} for item in found]
    return report


def _resolve_recipe(settings: ExportSettings) -> Recipe:
    names = split_names(settings.formats)
    if not names:
        raise UsageError(
            "export: --format is missing",
            hint=f"known formats: {', '.join(list_format_names())}",
        )
    return override_recipe(
        "kv",
        data={},
        scales={
            "rule": settings.rule,
            "fallback": settings.fallback,
            "fp8_dtype": settings.fp8_dtype,
        },
        top={"formats": names, "tp": settings.tp, "query_scale": settings.query_scale},
    )


def _check_weights(settings: ExportSettings, recipe: Recipe) -> None:
    if settings.with_weights and RFC.name not in recipe.formats:
        raise UsageError(
            "--with-weights needs --format rfc",
            hint="add --format rfc, or write an FP8 checkpoint with `fp8calib quantize`",
        )
    if settings.with_weights and settings.model is None:
        raise UsageError("--with-weights needs --model", hint="pass the model to quantize")


def _list_weight_files(settings: ExportSettings, tps: Iterable[int]) -> frozenset[str]:
    if not settings.with_weights:
        return frozenset()
    return frozenset(name for tp in tps for name in name_rank_files(tp).values())


def _prepare_weights(
    settings: ExportSettings, recipe: Recipe, stats: CalibrationStats, source: Checkpoint | None
) -> RankWeights | None:
    if not settings.with_weights or source is None:
        return None
    from fp8calib.cli.export.rank_weights import prepare_weights  # noqa: PLC0415 -- transformers

    return prepare_weights(stats, source, recipe)


@contextmanager
def _open_source(
    settings: ExportSettings, recipe: Recipe, stats: CalibrationStats
) -> Iterator[_Target]:
    options = GraftOptions(
        base=settings.base,
        other_weights=settings.other_weights,
        replaces_scales=settings.replace_scales,
    )
    if settings.model is None:
        options.refuse()
        yield _Target(source=None, stats=stats)
        return
    from fp8calib.model.load import find_folder  # noqa: PLC0415 -- imports transformers

    with Checkpoint.open(find_folder(settings.model, None), require_config=True) as checkpoint:
        if settings.with_weights and is_int4_source(checkpoint):
            _refuse_overlays(recipe.formats, checkpoint)
            yield _Target(source=checkpoint, stats=stats)
            return
        quantized = None if settings.with_weights else find_quantized(checkpoint)
        if quantized is None:
            options.refuse()
            if settings.with_weights:
                check_unquantized(checkpoint)
            check_stats_model(stats, checkpoint)
            graft = Graft(replaces_scales=options.replaces_scales)
            yield _Target(source=checkpoint, stats=stats, graft=graft)
            return
        stats = _adopt_names(stats, checkpoint)
        yield _Target(
            source=checkpoint,
            stats=stats,
            quantized=quantized,
            graft=relate_to_quantized(
                str(settings.stats),
                stats.origin,
                checkpoint,
                stats.geometry,
                options,
            ),
        )


def _adopt_names(stats: CalibrationStats, checkpoint: Checkpoint) -> CalibrationStats:
    """Give statistics the names that a quantized checkpoint of the same model has.

    Raises:
        ModelError: its config cannot be used, or it has another shape.
    """
    from fp8calib.model.geometry_from_config import read_geometry  # noqa: PLC0415 -- transformers

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


def _refuse_overlays(formats: Iterable[str], checkpoint: Checkpoint) -> None:
    names = [name for name in formats if find_dialect(name).needs_model]
    if names:
        raise UsageError(
            f"--format {names[0]}: an overlay needs the unquantized model, and the weights of "
            f"{checkpoint.folder} are int4",
            hint="export the overlay separately, with the unquantized --model",
        )
