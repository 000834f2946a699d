"""Write the scales of statistics in any format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.atomic import OutputFolder
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.dialects.kv.rfc import RFC, name_rank_files
from fp8calib.dialects.registry import find_dialect, list_format_names
from fp8calib.dialects.write import check_export, check_replaced, list_outputs, write_formats
from fp8calib.engines.serving import find_scale_serving
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import FP8_FORMATS
from fp8calib.jobs.arguments import checked
from fp8calib.jobs.export.graft import (
    GraftOptions,
    require_server,
)
from fp8calib.jobs.export.target import ExportTarget, ExportTask, open_target
from fp8calib.jobs.recipe_options import decide_query, list_ignored, override_recipe
from fp8calib.jobs.saved import ModelOrPath, saved_model, warn_of_tokenizer
from fp8calib.stats.calibration_stats import STATS_NAME, CalibrationStats, load_stats

if TYPE_CHECKING:
    from fp8calib.jobs.export.rank_weights import RankWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """The files that were written, and what a user should know about them."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    warnings: tuple[str, ...]
    served: Mapping[str, Any] = field(repr=False)
    """`serving`, `limitations` and `other_engines`; empty without a model."""


@checked
def export(
    stats: str | Path | CalibrationStats,
    formats: str | Sequence[str],
    out: str | Path,
    *,
    tp: int | Sequence[int] = 1,
    model: ModelOrPath | None = None,
    base: str | None = None,
    other_weights: bool = False,
    replace_scales: bool = False,
    rule: str | None = None,
    fallback: str | None = None,
    fp8_dtype: str | None = None,
    query_scale: str | None = None,
    with_weights: bool = False,
    tokenizer: Any = None,
    force: bool = False,
) -> Exported:
    """Write the scales of statistics in every requested format; no model runs.

    Args:
        stats: the statistics, or the path of the file.
        formats: names as for `--format`, such as `kv-overlay`.
        out: the folder that gets them.
        tp: tensor-parallel degrees of the JSON formats.
        model: the calibrated model, or a quantized checkpoint of it; overlays and weights need it.
            One in memory is written to a temporary folder beside `out`.
        base: the calibrated model, where `model` is quantized and the statistics have no hashes.
        other_weights: accept a quantized `model` whose norms differ.
        replace_scales: replace KV scales that `model` has.
        rule: `amax`, `percentile:P`, `mse` or `headroom:H`.
        fallback: `layer-max`, `one` or `refuse`.
        fp8_dtype: `e4m3fn` or `e4m3fnuz`.
        query_scale: `auto`, `yes` or `no`.
        with_weights: with `rfc`, also write the FP8 weights of every rank.
        tokenizer: written beside a model that is in memory.
        force: replace earlier output.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        DataError: the statistics are damaged.
        ModelError: the model cannot be read, or is another one.
        ExportError: a scale cannot be computed, or a format not written.
    """
    recipe = override_recipe(
        "kv",
        data={},
        scales={"rule": rule, "fallback": fallback, "fp8_dtype": fp8_dtype},
        top={
            "formats": (formats,) if isinstance(formats, str) else tuple(formats),
            "tp": (tp,) if isinstance(tp, int) else tuple(tp),
            "query_scale": query_scale,
        },
    )
    if not recipe.formats:
        raise UsageError(
            "export: --format is missing",
            hint=f"known formats: {', '.join(list_format_names())}",
        )
    for name in recipe.formats:
        find_dialect(name)  # refuses unknown ones
    options = GraftOptions(base=base, other_weights=other_weights, replaces_scales=replace_scales)
    with ExitStack() as stack:
        place = (
            None if model is None else stack.enter_context(saved_model(model, Path(out), tokenizer))
        )
        task = ExportTask(
            stats_name=STATS_NAME if isinstance(stats, CalibrationStats) else str(stats),
            recipe=recipe,
            model=place,
            model_name=str(model) if isinstance(model, str | Path) else "MODEL",
            out=Path(out),
            with_weights=with_weights,
            graft=options,
        )
        _check_weights(task)
        inputs = [] if isinstance(stats, CalibrationStats) else [Path(stats)]
        loaded = stats if isinstance(stats, CalibrationStats) else load_stats(Path(stats))
        done = _export(task, loaded, inputs=inputs, force=force)
    more = () if model is None else warn_of_tokenizer(model, tokenizer, done.files)
    return replace(done, warnings=(*done.warnings, *more))


def _export(
    task: ExportTask, stats: CalibrationStats, *, inputs: Sequence[Path], force: bool
) -> Exported:
    recipe = task.recipe
    fmt = FP8_FORMATS[recipe.scales.fp8_dtype]
    check_export(stats.geometry, recipe.formats, recipe.tp, fmt)
    query = decide_query(recipe, stats)
    with open_target(task, stats) as target:
        source, stats, graft = target.source, target.stats, target.graft
        if source is not None:
            check_replaced(recipe.formats, task.out, source)
        with OutputFolder(
            task.out,
            owned=list_outputs(recipe.formats, recipe.tp) | _list_weight_files(task),
            force=force,
            inputs=[*inputs, *([source.folder] if source else [])],
        ) as folder:
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
                quantized=None if weights is None else weights.tables,
                graft=graft,
            )
            served = _find_serving(task, target, folder)
            files = sorted([*written.files, *(weights.write(folder) if weights else ())])
        return Exported(
            out=task.out,
            files=tuple(files),
            warnings=(
                *list_ignored(recipe, given={"--tp": [tp for tp in recipe.tp if tp > 1]}),
                *query.notes,
                *(weights.notes if weights else ()),
                *target.describe(),
                *map(str, written.notes),
            ),
            served=served,
        )


def _find_serving(task: ExportTask, target: ExportTarget, folder: Path) -> dict[str, Any]:
    """Find who serves what was written; nothing without a model.

    Raises:
        ExportError: no server uses the overlay of a quantized model.
    """
    if target.source is None or task.with_weights:
        return {}
    report: dict[str, Any] = {"serving": [], "limitations": [], "other_engines": []}
    for dialect in map(find_dialect, task.recipe.formats):
        if target.quantized is not None and dialect.needs_model:
            require_server(folder / dialect.path(), target.stats.geometry, target.quantized)
        for tp in dialect.degrees(task.recipe.tp):
            serving = find_scale_serving(
                folder / dialect.path(tp),
                task.out / dialect.path(tp),
                target.stats.geometry,
                model=target.source.folder,
                model_name=task.model_name,
                tp=tp,
            )
            items: tuple[tuple[Any, ...], ...] = (
                serving.commands,
                serving.limitations,
                serving.others,
            )
            for key, found in zip(report, items, strict=True):
                described = ({"format": dialect.name, **asdict(item)} for item in found)
                report[key] += [item for item in described if item not in report[key]]
    return report


def _check_weights(task: ExportTask) -> None:
    if task.with_weights and RFC.name not in task.recipe.formats:
        raise UsageError(
            "--with-weights needs --format rfc",
            hint="add --format rfc, or write an FP8 checkpoint with `fp8calib quantize`",
        )
    if task.with_weights and task.model is None:
        raise UsageError("--with-weights needs --model", hint="pass the model to quantize")


def _list_weight_files(task: ExportTask) -> frozenset[str]:
    if not task.with_weights:
        return frozenset()
    return frozenset(name for tp in task.recipe.tp for name in name_rank_files(tp).values())


def _prepare_weights(
    task: ExportTask, stats: CalibrationStats, source: Checkpoint | None
) -> RankWeights | None:
    if not task.with_weights or source is None:
        return None
    from fp8calib.jobs.export.rank_weights import prepare_weights  # noqa: PLC0415 -- transformers

    return prepare_weights(stats, source, task.recipe)
