"""Recipes with the options of the command line applied."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from fp8calib.dialects.registry import (
    find_dialect,
    list_format_names,
    list_query_format_names,
)
from fp8calib.errors import RecipeError, UsageError, cut_list, shorten, suggest
from fp8calib.geometry.tensor_parallel import check_degree
from fp8calib.recipe import Data, Observe, Recipe, ScaleOptions, explain_value, load_recipe
from fp8calib.scales.compute import list_unfit_queries
from fp8calib.stats.calibration_stats import CalibrationStats


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


def override_recipe(
    name: str,
    *,
    data: Mapping[str, Any],
    scales: Mapping[str, Any],
    top: Mapping[str, Any],
    observe: Collection[str] | None = None,
) -> Recipe:
    """Load a recipe and apply a caller's options to it; None means not given.

    `observe` names all kinds of sites that are observed: kv, query, inputs, weights.

    Raises:
        RecipeError: the recipe itself is wrong.
        UsageError: an option has an invalid value.
    """
    recipe = open_recipe(name).model_dump()
    for degree in top.get("tp") or ():
        check_degree(degree)
    recipe |= _given(top)
    recipe["data"] |= _given(data)
    recipe["scales"] |= _given(scales)
    if observe is not None:
        recipe["observe"] |= _choose_kinds(observe)
    with _usage_errors():
        return Recipe.model_validate(recipe)


def make_scale_options(**given: Any) -> ScaleOptions:
    """Make the options of scales; None means not given.

    Raises:
        UsageError: an option has an invalid value.
    """
    with _usage_errors():
        return ScaleOptions.model_validate(_given(given))


def make_data_options(**given: Any) -> Data:
    """Make the options of a text; None means not given.

    Raises:
        UsageError: an option has an invalid value.
    """
    with _usage_errors():
        return Data.model_validate(_given(given))


@contextmanager
def _usage_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise UsageError(
            "; ".join(map(_explain_option, error.errors())), hint="see --help"
        ) from error


@dataclass(frozen=True, slots=True)
class QueryDecision:
    """Whether q scales are written, and what a user should know about it."""

    is_written: bool
    notes: tuple[str, ...] = ()


def check_query(recipe: Recipe) -> None:
    """Refuse q scales that are asked for in formats none of which holds them.

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


def decide_query(recipe: Recipe, stats: CalibrationStats) -> QueryDecision:
    """Decide for `auto` whether q scales are written: where q needs them in some layer."""
    check_query(recipe)
    if recipe.query_scale is True:
        return QueryDecision(is_written=True)
    storing = _list_storing(recipe)
    unfit = list_unfit_queries(stats)
    if not unfit or not recipe.formats:
        return QueryDecision(is_written=False)
    layers = cut_list([f"{layer} ({amax:.4g})" for layer, amax in unfit.items()], 6)
    why = f"q clips or underflows with scale 1.0 (layer and amax: {layers})"
    if recipe.query_scale is False:
        return QueryDecision(False, (f"{why}: use --query-scale yes",))
    if not storing:
        return QueryDecision(
            False, (f"{why}, and no format that stores q_scale is written: add kv-overlay",)
        )
    return QueryDecision(True, (f"{why}: q_scale is written to {', '.join(storing)}",))


def list_ignored(recipe: Recipe, *, given: Mapping[str, Any]) -> Iterator[str]:
    """Warn of options on the command line that have no effect with this recipe.

    `given` are the values of --tp, and of the options that choose text.
    """
    named = [name for name, value in given.items() if value]
    if "--tp" in named and not any(find_dialect(name).per_tp for name in recipe.formats):
        names = ", ".join(recipe.formats) or "nothing"
        yield f"--tp has no effect: {names} does not depend on the number of ranks"
    texts = [name for name in named if name != "--tp"]
    if texts and not recipe.observe.needs_forward:
        yield f"{', '.join(texts)}: no effect, as recipe {recipe.name} runs no text"
    elif "--seed" in named and len(recipe.data.sources) < 2:
        yield "--seed has no effect: it is for mixing several --data"


def _choose_kinds(names: Collection[str]) -> dict[str, bool]:
    known = [name for name in Observe.model_fields if name != "ignore"]
    if not set(names) <= set(known):
        raise UsageError(f"observe {names!r}: must be a list of {', '.join(known)}")
    return {name: name in names for name in known}


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _explain_option(item: Any) -> str:
    option = str(item["loc"][-1] if isinstance(item["loc"][-1], str) else item["loc"][-2])
    return f"--{option.replace('_', '-')}: {explain_value(item)}"
