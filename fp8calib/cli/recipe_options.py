"""Recipes with the options of the command line applied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fp8calib.errors import UsageError
from fp8calib.recipe import Recipe, explain_value, load_recipe


def override_recipe(
    name: str, *, data: Mapping[str, Any], scales: Mapping[str, Any], top: Mapping[str, Any]
) -> Recipe:
    """Load a recipe and apply command-line options to it; None means not given.

    Raises:
        RecipeError: the recipe itself is wrong.
        UsageError: an option has an invalid value.
    """
    recipe = load_recipe(name).model_dump()
    recipe |= _given(top)
    recipe["data"] |= _given(data)
    recipe["scales"] |= _given(scales)
    try:
        return Recipe.model_validate(recipe)
    except ValidationError as error:
        raise UsageError(
            "; ".join(map(_explain_option, error.errors())), hint="see --help"
        ) from error


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _explain_option(item: Any) -> str:
    option = str(item["loc"][-1] if isinstance(item["loc"][-1], str) else item["loc"][-2])
    return f"--{option.replace('_', '-')}: {explain_value(item)}"
