"""Recipes are parsed and checked, their patterns resolved, and shipped ones found."""

from pathlib import Path

import pytest

from fp8calib.commands.options import describe_recipes
from fp8calib.commands.recipe import Quantize, load_recipe
from fp8calib.errors import RecipeError
from fp8calib.model.module_paths import match_names

MODULES = ["model.layers.0.self_attn", "model.layers.0.mlp.up_proj", "model.layers.10.self_attn"]


def test_shipped_recipes_are_named_like_their_files_and_described_in_their_first_line() -> None:
    for name, description in describe_recipes():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.description) == (name, description)
        assert description


@pytest.mark.parametrize("pattern", ["self_attn", "re:self_attn", "model.layers.0", "*.SELF_ATTN"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(RecipeError, match="matches nothing"):
        match_names(pattern, MODULES, "observe.ignore")


def test_a_recipe_of_0_2_says_that_weights_are_rounded_to_nearest(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    text = "name: mine\nquantize: {{scheme: fp8-dynamic, rounding: {}}}\n"
    path.write_text(text.format("nearest"))
    assert load_recipe(str(path)).quantize == Quantize(scheme="fp8-dynamic")

    path.write_text(text.format("gptq"))
    with pytest.raises(RecipeError, match="rounding"):
        load_recipe(str(path))
