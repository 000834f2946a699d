"""List the recipes, or explain one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.recipe import Recipe, find_section, load_recipe, recipe_files
from fp8calib.requests.recipes import RecipesRequest
from fp8calib.results.recipes import RecipeKey, RecipeList, RecipeShown


def run(
    request: RecipesRequest,
    reporter: Reporter,  # noqa: ARG001
) -> RecipeList | RecipeShown:
    """List the recipes, or load one.

    Raises:
        RecipeError: there is no such recipe, or it is invalid.
    """
    if request.name is None:
        return RecipeList(recipes={key: load_recipe(key).description for key in recipe_files()})
    return RecipeShown(recipe=_open(str(request.name)), keys=dict(_describe_fields(Recipe)))


def _open(name: str) -> Recipe:
    """Load a recipe; a file's formats are checked too, which those of shipped recipes need not."""
    if name in recipe_files():
        return load_recipe(name)
    from fp8calib.jobs.recipe_options import open_recipe  # noqa: PLC0415 -- imports torch

    return open_recipe(name)


def _describe_fields(
    model: Any, *, prefix: str = "", required: str = "required"
) -> Iterator[tuple[str, RecipeKey]]:
    for name, field in model.model_fields.items():
        section = find_section(field.annotation)
        if section is not None:
            missing = "required" if field.default is not None else "null"
            yield from _describe_fields(section, prefix=f"{prefix}{name}.", required=missing)
        else:
            default = required if field.is_required() else _format_default(field.default)
            yield (
                f"{prefix}{name}",
                RecipeKey(default=default, description=field.description or ""),
            )


def _format_default(default: object) -> str:
    if isinstance(default, tuple):
        return "[" + ", ".join(map(str, default)) + "]"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default)


recipes = as_function("recipes", RecipesRequest, run)
