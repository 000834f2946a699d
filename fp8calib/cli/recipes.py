"""`fp8calib recipes`: list the recipes, or print one with an explanation of every key."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import yaml

from fp8calib.cli.console import print_json, print_table, print_text, prints_json
from fp8calib.recipe import Recipe, find_section, load_recipe, recipe_files
from fp8calib.requests.recipes import RecipesRequest
from fp8calib.scales.rules import Rule


def run_recipes(request: RecipesRequest) -> None:
    """Print a recipe, or the list of all.

    Raises:
        RecipeError: there is no such recipe, or it is invalid.
    """
    if request.name is not None:
        recipe = _open(request.name)
        if prints_json():
            keys = _describe_fields(Recipe)
            print_json({"recipe": recipe.model_dump(mode="json"), "schema": keys})
            return
        print_text("\n".join(_write_explained(recipe)))
        return
    recipes = {key: load_recipe(key) for key in recipe_files()}
    if prints_json():
        print_json({"recipes": {key: r.description for key, r in recipes.items()}})
        return
    print_table("recipes", ["name", "purpose"], [[k, r.description] for k, r in recipes.items()])


def _open(name: str) -> Recipe:
    """Load a recipe; a file's formats are checked too, which those of shipped recipes need not."""
    if name in recipe_files():
        return load_recipe(name)
    from fp8calib.jobs.recipe_options import open_recipe  # noqa: PLC0415 -- imports torch

    return open_recipe(name)


_WIDTH = 76
_INDENT = "  "


def _write_explained(recipe: Recipe) -> Iterator[str]:
    """Write the lines of a recipe file: every key explained, those that are not set after a #."""
    yield "# A recipe of fp8calib. A key after a # has the value that counts without it."
    yield from _write_section(Recipe, recipe.model_dump(mode="json", exclude_unset=True), "")


def _write_section(model: Any, given: Mapping[str, Any], indent: str) -> Iterator[str]:
    for name, field in model.model_fields.items():
        is_set = given.get(name) is not None
        yield ""
        yield from textwrap.wrap(
            field.description, _WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
        )
        if (section := find_section(field.annotation)) is not None:
            yield f"{indent}{name}:"
            yield from _write_section(section, given.get(name) or {}, f"{indent}{_INDENT}")
            continue
        value = field.get_default() if name not in given else given[name]
        value = "required" if field.is_required() and not is_set else _spell(value)
        yield f"{indent}{'' if is_set else '#'}{name}: {value}"


def _spell(value: object) -> str:
    """Spell a value as YAML in one line."""
    plain = list(value) if isinstance(value, tuple) else value
    plain = str(plain) if isinstance(plain, StrEnum | Rule) else plain
    text = yaml.safe_dump(plain, default_flow_style=True, width=2**20, allow_unicode=True)
    return text.strip().removesuffix("...").strip()


def _describe_fields(
    model: Any, *, prefix: str = "", required: str = "required"
) -> dict[str, dict[str, str]]:
    explained: dict[str, dict[str, str]] = {}
    for name, field in model.model_fields.items():
        section = find_section(field.annotation)
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
