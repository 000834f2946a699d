"""Write the scales of statistics in any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import KW_ONLY
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.request import Reporter, as_function, option, request_class
from fp8calib.commands.result import Result, WrittenCheck, describe_written
from fp8calib.errors import UsageError, format_count, join_or
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.text import Block, Line

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats
    from fp8calib.checkpoint.checkpoint import Checkpoint
    from fp8calib.commands.recipe import Recipe
    from fp8calib.formats.dialect import Attachment
    from fp8calib.formats.quantized_model import QuantizedModel


@request_class
class ExportRequest:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out --model SmolLM2-135M-Instruct --format kv-overlay-head --out heads
    """

    stats: shared.Stats | Sequence[shared.Stats] = option(
        "STATS...",
        "stats.safetensors of a calibration, or its folder. Several are the shards of one "
        "run: they are joined, and stats.safetensors of the run is written too, or only that "
        "without --format.",
        reads=list[Path],
        check=shared.check_stats,
    )
    out: str | Path = option("--out DIR", "Output folder.", reads=Path)
    _: KW_ONLY
    recipe: str | Path | None = option(
        "--recipe FILE",
        "A recipe whose rules and formats are used, such as that of `fp8calib plan`.",
        reads=str,
        default=None,
    )
    formats: str | Sequence[str] | None = option(shared.FORMATS, default=None)
    tp: int | Sequence[int] | None = option(shared.TP, default=None)
    model: shared.Model | None = option(
        "--model MODEL",
        "The calibrated model, or a quantized checkpoint of it (an overlay "
        "keeps its quantization); needed for overlays and weights.",
        reads=str,
        check=find_local_model,
        default=None,
    )
    revision: str | None = option(shared.REVISION, default=None)
    other_weights: bool = option(shared.OTHER_WEIGHTS, default=False)
    replace_scales: bool = option(shared.REPLACE_SCALES, default=False)
    rule: str | None = option(shared.RULE, default=None)
    fallback: str | None = option(shared.FALLBACK, default=None)
    fp8_dtype: str | None = option(shared.FP8_DTYPE, default=None)
    query_scale: str | None = option(shared.QUERY_SCALE, default=None)
    with_weights: bool = option(
        "--with-weights",
        "With --model: write the FP8 weights of every rank beside --format rfc. MODEL "
        "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
        "holds the compound scales.",
        default=False,
    )
    check: bool = option(shared.CHECK, default=True)
    force: bool = option(shared.FORCE, default=False)
    tokenizer: Any = option(shared.TOKENIZER, default=None)


class ExportResult(Result):
    """The files that were written, and what a user should know: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    warnings: tuple[str, ...]
    shards: tuple[str, ...] = ()
    """The statistics that were joined; empty for those of one run."""
    compared: str = ""
    """Which linears of a quantized model were compared with the calibrated one, in words."""
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""


def run(request: ExportRequest, reporter: Reporter) -> ExportResult:
    """Write the scales of statistics in every requested format; no model runs.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        RecipeError: the recipe is invalid, or a pattern of it matches nothing.
        ModelError: the statistics are damaged, or not all shards of one run; or the model cannot be
            read, or is another one.
        ExportError: a scale cannot be computed, or a format not written.
    """
    with slow_imports():
        from fp8calib.checkpoint.checkpoint import Checkpoint
        from fp8calib.checkpoint.hub import find_folder
        from fp8calib.commands.model_folder import saved_model
        from fp8calib.commands.stats import join_stats
        from fp8calib.formats.write import check_export
        from fp8calib.numerics.formats import FP8_FORMATS
    stats, inputs, shards = join_stats(request.stats)
    recipe = _make_recipe(request, is_joined=bool(shards))
    check_export(stats.geometry, recipe.formats, recipe.tp, FP8_FORMATS[recipe.scales.fp8_dtype])
    source, missing = None, list[str]()
    with ExitStack() as stack:
        if request.model is not None:
            makes_checkpoint = any(find_dialect(each).needs_model for each in recipe.formats)
            warn = missing.append if makes_checkpoint else None
            saved = saved_model(request.model, Path(request.out), request.tokenizer, warn=warn)
            folder = find_folder(stack.enter_context(saved), request.revision)
            source = stack.enter_context(Checkpoint.open(folder))
        result = _write(request, recipe, stats, source, inputs, shards)
    result = result.model_copy(update={"warnings": (*result.warnings, *missing)})
    for text in result.warnings:
        reporter.warn(text)
    return result


def _make_recipe(request: ExportRequest, *, is_joined: bool) -> Recipe:
    """Open the recipe, and apply the options."""
    from fp8calib.commands.recipe import Recipe, apply_request, load_recipe
    from fp8calib.formats.kv.json import RFC

    plain = Recipe(name="kv", formats=())
    recipe = plain if request.recipe is None else load_recipe(str(request.recipe))
    recipe, _ = apply_request(recipe, request)
    if request.with_weights and RFC.name not in recipe.formats:  # which names them
        recipe = recipe.model_copy(update={"formats": (*recipe.formats, RFC.name)})
    if not recipe.formats and not is_joined:
        alone = [name for name in list_format_names() if not find_dialect(name).needs_model]
        raise UsageError(
            "export: --format is missing",
            hint=f"add --format kv-overlay --model MODEL, or --format {join_or(alone)}",
        )
    if request.with_weights and request.model is None:
        raise UsageError("--with-weights needs --model", hint="add --model MODEL")
    return recipe


def _write(
    request: ExportRequest,
    recipe: Recipe,
    given: RunStats,
    source: Checkpoint | None,
    inputs: Sequence[Path],
    shards: tuple[str, ...],
) -> ExportResult:
    from fp8calib.calibration.calibration_stats import save_stats
    from fp8calib.calibration.origin import STATS_NAME
    from fp8calib.checkpoint.output import list_files, output_folder
    from fp8calib.commands.check_written import finish_formats, require_server
    from fp8calib.commands.recipe import decide_query
    from fp8calib.formats.compute import write_formats
    from fp8calib.formats.kv.json import name_rank_files
    from fp8calib.formats.write import check_replaced, list_outputs
    from fp8calib.numerics.formats import FP8_FORMATS

    query, notes = decide_query(recipe, given)
    name = str(inputs[0]) if inputs and not shards else STATS_NAME
    stats, attachment, quantized, related = _relate(request, recipe, given, name, source)
    out, weights, owned = Path(request.out), None, list_outputs(recipe.formats, recipe.tp)
    joined, fmt = [STATS_NAME] if shards else [], FP8_FORMATS[recipe.scales.fp8_dtype]
    if source is not None:
        check_replaced(recipe.formats, out, source)
    if request.with_weights:
        owned |= {name for tp in recipe.tp for name in name_rank_files(tp).values()}
    with output_folder(
        out,
        owned=owned.union(joined),
        force=request.force,
        inputs=[*inputs, *([source.folder] if source else [])],
    ) as folder:
        if joined:
            save_stats(given, folder / STATS_NAME)
        if request.with_weights and source is not None:
            from fp8calib.quantization.rank_weights import prepare_weights  # imports transformers

            weights = prepare_weights(stats, source, fmt, recipe.tp, recipe.scales.choice)
        written = write_formats(
            *(stats, recipe.formats, folder),
            fmt=fmt,
            tps=recipe.tp,
            source=source,
            query=query,
            rules=recipe.scales.choice,
            quantized=None if weights is None else weights.tables,
            attachment=attachment,
        )
        for dialect in map(find_dialect, recipe.formats):
            if quantized is not None and dialect.needs_model:
                require_server(folder / dialect.path(), stats.geometry, quantized)
        if weights is not None:
            weights.write(folder)
        # the scales of a quantized model's own weights and inputs are judged too
        is_same = quantized is not None and not request.other_weights
        checked = finish_formats(
            *(recipe.formats, folder, out, request.model or ""),
            revision=request.revision,
            check=request.check,
            stats=stats if is_same else None,
        )
        files = list_files(folder)
    return ExportResult(
        out=out,
        files=files,
        shards=shards,
        warnings=(
            *notes,
            *(weights.notes if weights else ()),
            *related,
            *written,
        ),
        compared=attachment.compared,
        checked=checked,
    )


def _relate(
    request: ExportRequest,
    recipe: Recipe,
    given: RunStats,
    name: str,
    source: Checkpoint | None,
) -> tuple[RunStats, Attachment, QuantizedModel | None, list[str]]:
    """Refuse a model that does not fit the statistics, which messages call `name`.

    Returns:
        The statistics, for a quantized model with its own names of tensors; how they belong to the
        model; what is quantized in it, if something is; and what a user should know about it.
    """
    from fp8calib.formats.dialect import Attachment
    from fp8calib.formats.quantized_model import find_quantized
    from fp8calib.quantization.attachment import adopt_names, relate_to_quantized
    from fp8calib.quantization.calibrated_scales import check_stats_model
    from fp8calib.quantization.select import check_unquantized
    from fp8calib.quantization.sources.int4 import is_int4_source

    plain = given, Attachment(replaces_scales=request.replace_scales), None, list[str]()
    if source is None:
        return plain
    if request.with_weights and is_int4_source(source):
        overlays = [name for name in recipe.formats if find_dialect(name).needs_model]
        if overlays:
            raise UsageError(
                f"--format {overlays[0]}: an overlay needs the unquantized model, and the weights "
                f"of {source.folder} are int4",
                hint=f"leave out --format {overlays[0]}, and export it from the unquantized model",
            )
        return plain
    quantized = None if request.with_weights else find_quantized(source)
    if quantized is None:
        if request.with_weights:
            check_unquantized(source)
        check_stats_model(given, source)
        return plain
    stats = adopt_names(given, source)
    attachment, related = relate_to_quantized(
        *(name, stats.origin, source, stats.geometry),
        other_weights=request.other_weights,
        replace_scales=request.replace_scales,
    )
    return stats, attachment, quantized, related


def describe(result: ExportResult, request: ExportRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe where the files are, and what engines do with them."""
    if result.shards:
        yield Line(f"joined {format_count(len(result.shards), 'shard')}")
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    yield from describe_written(result.out, result.files, result.checked)


export = as_function("export", ExportRequest, run)
