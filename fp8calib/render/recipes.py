"""The list of recipes as a table, and one recipe as YAML in which every key is explained."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

import yaml

from fp8calib.blocks import Block, Line, Table
from fp8calib.recipe import Recipe, find_section
from fp8calib.requests.recipes import RecipesRequest
from fp8calib.results.recipes import RecipeList, RecipeShown
from fp8calib.scales.rules import Rule

_WIDTH = 76
_INDENT = "  "


def describe(result: RecipeList | RecipeShown, request: RecipesRequest) -> Iterator[Block]:  # noqa: ARG001
    """List the recipes, or explain one."""
    if isinstance(result, RecipeShown):
        yield Line("\n".join(_write_explained(result.recipe)))
    else:
        rows = [list(item) for item in result.recipes.items()]
        yield Table(title="recipes", columns=["name", "purpose"], rows=rows)


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
