"""Recipes with the options of a request applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.observe import Observe
from fp8calib.commands.option import Declared, list_options
from fp8calib.commands.options import DATA, SEED, TP, TextData
from fp8calib.commands.recipe import Recipe, explain_value
from fp8calib.data.rows import ReadRow
from fp8calib.data.sources import split_data
from fp8calib.errors import UsageError, cut_list
from fp8calib.formats.registry import find_dialect, list_query_format_names
from fp8calib.model.tensor_parallel import check_degree

M = TypeVar("M", bound=BaseModel)


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
    return validate(Recipe, recipe, list_options(type(request)))


def _list_given(request: object) -> Iterator[tuple[Declared, Any]]:
    """List the fields that override a key of a recipe, with their values."""
    for declared in list_options(type(request)):
        key, value = declared.option.key, getattr(request, declared.name)
        if key and key != DATA.key and value is not None:
            yield declared, value


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, str | int) else tuple(value)


def validate(kind: type[M], values: Mapping[str, Any], declared: list[Declared]) -> M:
    """Make a recipe, or a section of one; a fault is told by the option of its key.

    Raises:
        UsageError: an option has an invalid value.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        options = {each.option.key or each.name: each.spelled for each in declared}
        explained = []
        for item in error.errors():  # by the option of the key that holds the wrong value
            keys = [each for each in item["loc"] if isinstance(each, str)]
            option = options.get(".".join(keys), f"--{keys[-1].replace('_', '-')}")
            explained.append(f"{option}: {explain_value(item)}")
        raise UsageError("; ".join(explained), hint="see --help") from error


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


def list_ignored(recipe: Recipe, request: Any) -> Iterator[str]:
    """Warn of options that have no effect with this recipe."""
    given = [declared.option for declared, _ in _list_given(request)]
    is_per_tp = any(find_dialect(name).per_tp for name in recipe.formats)
    if TP in given and request.out is not None and not is_per_tp:
        names = ", ".join(recipe.formats) or "nothing"
        yield f"{TP.flags} has no effect: {names} does not depend on the number of ranks"
    texts = [each.flags for each in given if each.key.startswith("data.")]
    if getattr(request, "data", None) is not None:
        texts.insert(0, DATA.flags)
    if texts and not recipe.observe.needs_forward:
        yield f"{', '.join(texts)}: no effect, as recipe {recipe.name} runs no text"
    elif SEED in given and len(recipe.data.sources) < 2:
        yield f"{SEED.flags} has no effect: it is for mixing several --data"


def check_query(recipe: Recipe) -> None:
    """Refuse q scales where no format that is written can hold them.

    Raises:
        UsageError: naming the formats.
    """
    is_stored = any(find_dialect(name).has_query for name in recipe.formats)
    if recipe.query_scale is True and recipe.formats and not is_stored:
        raise UsageError(
            f"--query-scale yes: {', '.join(recipe.formats)} cannot hold q_scale",
            hint=f"add --format {' or '.join(list_query_format_names())}, or leave it out",
        )


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
    storing = [name for name in recipe.formats if find_dialect(name).has_query]
    if not storing:
        return False, [f"{why}, and no format that stores q_scale is written: add kv-overlay"]
    return True, [f"{why}: q_scale is written to {', '.join(storing)}"]
