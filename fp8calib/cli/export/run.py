"""Run `fp8calib export`: load statistics, check, write, print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.cli.console import list_top_level, print_json, print_text, warn
from fp8calib.cli.export.settings import ExportSettings
from fp8calib.cli.option_types import split_names
from fp8calib.cli.recipe_options import decide_query, override_recipe
from fp8calib.dialects.kv.rfc import RFC, name_rank_files
from fp8calib.dialects.registry import find_dialect, list_format_names
from fp8calib.dialects.write import check_export, check_replaced, list_outputs, write_formats
from fp8calib.errors import ExportError, UsageError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.quantization.sources.already_quantized import check_unquantized
from fp8calib.quantization.sources.int4 import is_int4_source
from fp8calib.recipe import Recipe
from fp8calib.stats.calibration_origin import explain_difference
from fp8calib.stats.calibration_stats import CalibrationStats, load_stats
from fp8calib.stats.fingerprint import fingerprint_model

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
    with _open_source(settings, recipe, stats) as source:
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
            )
            files = sorted([*written.files, *(weights.write(folder) if weights else ())])
    notes = [*query.notes, *(weights.notes if weights else ()), *map(str, written.notes)]
    for note in notes:
        warn(note)
    if settings.as_json:
        print_json({"out": str(settings.out), "files": files, "warnings": notes})
    else:
        print_text(f"written to {settings.out}: {list_top_level(files)}")


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
) -> Iterator[Checkpoint | None]:
    model = settings.model
    if model is None:
        yield None
        return
    from fp8calib.model.load import find_folder  # noqa: PLC0415 -- imports transformers

    with Checkpoint.open(find_folder(model, None), require_config=True) as checkpoint:
        if settings.with_weights and is_int4_source(checkpoint):
            _refuse_overlays(recipe.formats, checkpoint)
        else:
            _check_model(settings, stats, checkpoint)
        yield checkpoint


def _refuse_overlays(formats: Iterable[str], checkpoint: Checkpoint) -> None:
    names = [name for name in formats if find_dialect(name).needs_model]
    if names:
        raise UsageError(
            f"--format {names[0]}: an overlay needs the unquantized model, and the weights of "
            f"{checkpoint.folder} are int4",
            hint="export the overlay separately, with the unquantized --model",
        )


def _check_model(settings: ExportSettings, stats: CalibrationStats, checkpoint: Checkpoint) -> None:
    """Refuse a model other than the statistics', and one that is quantized already."""
    if settings.with_weights:
        check_unquantized(checkpoint)
    measured = stats.header.model_fingerprint
    fingerprint = fingerprint_model(checkpoint.load_config(), checkpoint)
    if fingerprint != measured:
        raise ExportError(
            f"{settings.model} is not the model these statistics were calibrated on, which had "
            f"{explain_difference(measured, fingerprint)}",
            hint="pass the model that was calibrated",
        )
