"""`fp8calib recipes`: list the recipes, or print one with an explanation of every key."""

from __future__ import annotations

from typing import Any, get_args

from fp8calib.cli.console import print_json, print_table, print_text
from fp8calib.recipe import Recipe, load_recipe, read_recipe, recipe_files


def run_recipes(name: str | None, *, as_json: bool) -> None:
    """Print the recipe called `name`, or the list of all.

    Raises:
        RecipeError: there is no such recipe, or it is invalid.
    """
    if name is not None:
        recipe, keys = _open(name), _describe_fields(Recipe)
        if as_json:
            print_json({"recipe": recipe.model_dump(mode="json"), "schema": keys})
            return
        print_text(read_recipe(name))
        rows = [[key, text["default"], text["description"]] for key, text in keys.items()]
        print_table("keys of a recipe", ["key", "default", "meaning"], rows)
        return
    recipes = {key: load_recipe(key) for key in recipe_files()}
    if as_json:
        print_json({"recipes": {key: r.description for key, r in recipes.items()}})
        return
    print_table("recipes", ["name", "purpose"], [[k, r.description] for k, r in recipes.items()])


def _open(name: str) -> Recipe:
    """Load a recipe; a file's formats are checked too, which those of shipped recipes need not."""
    if name in recipe_files():
        return load_recipe(name)
    from fp8calib.api.recipe_options import open_recipe  # noqa: PLC0415 -- imports torch

    return open_recipe(name)


def _describe_fields(
    model: Any, *, prefix: str = "", required: str = "required"
) -> dict[str, dict[str, str]]:
    explained: dict[str, dict[str, str]] = {}
    for name, field in model.model_fields.items():
        sections = (field.annotation, *get_args(field.annotation))  # of `Section | None`
        section = next((each for each in sections if hasattr(each, "model_fields")), None)
        if section is not None:
            missing = "required" if field.default is not None else "null"
            explained |= _describe_fields(section, prefix=f"{prefix}{name}.", required=missing)
        else:
            default = required if field.is_required() else _format_default(field.default)
            explained[f"{prefix}{name}"] = {
                "default": default,
                "description": field.description or "",
            }
    return explained


def _format_default(default: object) -> str:
    if isinstance(default, tuple):
        return "[" + ", ".join(map(str, default)) + "]"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default)
