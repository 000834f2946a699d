"""Recipes with the options of a request applied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.observe import Observe
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.commands.option import Declared, list_options
from fp8calib.commands.options import (
    BATCH_SIZE,
    DATA,
    PACK,
    SAMPLES,
    SEED,
    SEQ_LEN,
    TEXT_COLUMN,
    TP,
    TextData,
)
from fp8calib.commands.recipe import Recipe, ScaleOptions, explain_value, load_recipe
from fp8calib.data.rows import ReadRow
from fp8calib.data.sources import split_data
from fp8calib.errors import RecipeError, UsageError, cut_list, shorten, suggest
from fp8calib.formats.dialect import Attachment
from fp8calib.formats.registry import (
    find_dialect,
    list_format_names,
    list_query_format_names,
)
from fp8calib.formats.table import ScaleTable
from fp8calib.formats.write import WrittenFormats, write_formats
from fp8calib.model.tensor_parallel import check_degree
from fp8calib.numerics.formats import FP8_FORMATS

M = TypeVar("M", bound=BaseModel)


def open_recipe(name: str) -> Recipe:
    """Load a shipped recipe by name, or a YAML file, and refuse formats that do not exist.

    Raises:
        RecipeError: there is no such recipe, or it is invalid.
    """
    recipe = load_recipe(name)
    known = list_format_names()
    for each in recipe.formats:
        if each not in known:
            raise RecipeError(
                f"{name}: formats: unknown format {shorten(each)}",
                hint=suggest(each, known, what="formats"),
            )
    return recipe


def apply_request(made: Recipe, request: object) -> Recipe:
    """Apply to a recipe what a request gives; None means not given.

    A field overrides the key that its option names, except for the text (`resolve_text`). The
    field `observe` names all kinds of sites that are observed: kv, query, inputs, weights.

    Raises:
        UsageError: an option has an invalid value.
    """
    recipe = made.model_dump()
    for declared, value in _list_given(request):
        if declared.option.key == TP.key:
            for degree in _as_tuple(value):
                check_degree(degree)
        *sections, key = declared.option.key.split(".")
        section = reduce(dict.__getitem__, sections, recipe)
        section[key] = _as_tuple(value) if isinstance(section[key], tuple) else value
    if (kinds := getattr(request, "observe", None)) is not None:
        known = [name for name in Observe.model_fields if name != "ignore"]
        if not set(kinds) <= set(known):
            raise UsageError(f"observe {kinds!r}: must be a list of {', '.join(known)}")
        recipe["observe"] |= {name: name in kinds for name in known}
    return _validate(Recipe, recipe, request)


def resolve_text(recipe: Recipe, data: TextData | None) -> tuple[Recipe, Iterator[ReadRow] | None]:
    """Give the recipe with the specs of the caller's text, or else the rows of this text.

    Raises:
        DataError: there are no rows.
    """
    specs, rows = split_data(data, text_column=recipe.data.text_column)
    if not specs:
        return recipe, rows
    changed = recipe.data.model_copy(update={"sources": tuple(specs)})
    return recipe.model_copy(update={"data": changed}), None


def make_scale_options(**given: Any) -> ScaleOptions:
    """Make the options of scales; None means not given.

    Raises:
        UsageError: an option has an invalid value.
    """
    values = {key: value for key, value in given.items() if value is not None}
    return _validate(ScaleOptions, values, None)


def list_given(request: object) -> list[str]:
    """List the options for keys of a recipe that were given, as messages name them."""
    texts = [] if getattr(request, "data", None) is None else [DATA]
    given = [declared.option for declared, _ in _list_given(request)]
    return [each.flags for each in (*texts, *given)]


def _list_given(request: object) -> Iterator[tuple[Declared, Any]]:
    """List the fields that override a key of a recipe, with their values."""
    for declared in list_options(type(request)):
        key, value = declared.option.key, getattr(request, declared.name)
        if key and key != DATA.key and value is not None:
            yield declared, value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str | int) else tuple(value)


def _validate(kind: type[M], values: Mapping[str, Any], request: object) -> M:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        declared = [] if request is None else list_options(type(request))
        options = {each.option.key or each.name: each.spelled for each in declared}
        explained = []
        for item in error.errors():  # by the option of the key that holds the wrong value
            keys = [each for each in item["loc"] if isinstance(each, str)]
            option = options.get(".".join(keys), f"--{keys[-1].replace('_', '-')}")
            explained.append(f"{option}: {explain_value(item)}")
        raise UsageError("; ".join(explained), hint="see --help") from error


def check_query(recipe: Recipe) -> None:
    """Refuse q scales where no format that is written can hold them.

    Raises:
        UsageError: naming the formats.
    """
    if recipe.query_scale is True and recipe.formats and not _list_storing(recipe):
        raise UsageError(
            f"--query-scale yes: {', '.join(recipe.formats)} cannot hold q_scale",
            hint=f"add --format {' or '.join(list_query_format_names())}, or leave it out",
        )


def _list_storing(recipe: Recipe) -> list[str]:
    return [name for name in recipe.formats if find_dialect(name).has_query]


def decide_query(recipe: Recipe, stats: CalibrationStats) -> tuple[bool, list[str]]:
    """Decide whether q scales are written; for `auto`, where q needs them in some layer.

    Gives notes too, of what a user should know about it.
    """
    check_query(recipe)
    unfit = stats.list_unfit_queries()
    if recipe.query_scale is True or not unfit or not recipe.formats:
        return recipe.query_scale is True, []
    layers = cut_list([f"{layer} ({amax:.4g})" for layer, amax in unfit.items()], 6)
    why = f"q clips or underflows with scale 1.0 (layer and amax: {layers})"
    if recipe.query_scale is False:
        return False, [f"{why}: use --query-scale yes"]
    storing = _list_storing(recipe)
    if not storing:
        return False, [f"{why}, and no format that stores q_scale is written: add kv-overlay"]
    return True, [f"{why}: q_scale is written to {', '.join(storing)}"]


def write_recipe(
    recipe: Recipe,
    stats: CalibrationStats,
    folder: Path,
    *,
    source: Checkpoint | None,
    query: bool,
    attachment: Attachment,
    quantized: Mapping[int, ScaleTable] | None = None,
) -> WrittenFormats:
    """Write the formats of a recipe with its scales; the arguments are those of `write_formats`."""
    return write_formats(
        stats,
        recipe.formats,
        folder,
        fmt=FP8_FORMATS[recipe.scales.fp8_dtype],
        tps=recipe.tp,
        source=source,
        query=query,
        fallback=recipe.scales.fallback,
        rule=recipe.scales.rule,
        rules=recipe.scales.rules,
        quantized=quantized,
        attachment=attachment,
    )


def list_ignored(recipe: Recipe, given: Collection[str]) -> Iterator[str]:
    """Warn of options that have no effect with this recipe; `given` are those of its keys."""
    if TP.flags in given and not any(find_dialect(name).per_tp for name in recipe.formats):
        names = ", ".join(recipe.formats) or "nothing"
        yield f"{TP.flags} has no effect: {names} does not depend on the number of ranks"
    texts = [name for name in given if name in _TEXT_OPTIONS]
    if texts and not recipe.observe.needs_forward:
        yield f"{', '.join(texts)}: no effect, as recipe {recipe.name} runs no text"
    elif SEED.flags in given and len(recipe.data.sources) < 2:
        yield f"{SEED.flags} has no effect: it is for mixing several --data"


_TEXT_OPTIONS = [
    each.flags for each in (DATA, TEXT_COLUMN, SAMPLES, SEQ_LEN, BATCH_SIZE, PACK, SEED)
]
