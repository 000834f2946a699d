"""What `recipes` lists."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import Field

from fp8calib.overview import Overview
from fp8calib.recipe import Recipe
from fp8calib.results.record import Record, Result


class RecipeList(Result):
    """The recipes that are part of fp8calib."""

    recipes: Mapping[str, str]
    """The purpose of each, by its name."""

    def overview(self) -> Overview:
        """List them."""
        rows = [list(item) for item in self.recipes.items()]
        return Overview("RecipeList", ("name", "purpose"), rows)


class RecipeKey(Record):
    """A key of a recipe."""

    default: str
    description: str


class RecipeShown(Result):
    """One recipe, and what its keys mean."""

    recipe: Recipe
    keys: Mapping[str, RecipeKey] = Field(serialization_alias="schema")
    """By the path of each key, such as `data.samples`."""

    def overview(self) -> Overview:
        """Give its name and purpose."""
        return Overview(f"RecipeShown: {self.recipe.name}", notes=[self.recipe.description])
