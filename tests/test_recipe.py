"""Recipes are parsed and checked, their patterns resolved, and shipped ones found."""

from __future__ import annotations

import pytest

from fp8calib.commands.options import describe_recipes
from fp8calib.commands.recipe import load_recipe, parse_recipe
from fp8calib.errors import RecipeError
from fp8calib.model.module_paths import match_modules

MODULES = ["model.layers.0.self_attn", "model.layers.0.mlp.up_proj", "model.layers.10.self_attn"]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("name: x\nnonsense: 1", "nonsense: unknown key"),
        ("name: x\nsamples: 4", "samples: unknown key: did you mean data.samples?"),
        ("name: x\ndata: {formats: [rfc]}", "formats: unknown key: did you mean formats?"),
        ("name: x\ndata: {rule: mse}", "data.rule: unknown key: did you mean scales.rule?"),
        ("name: x\ntp: [1]\ntp: [2]", "line 3, column 1: the key 'tp' occurs twice"),
        ("name: x\ndata: {samples: 1, samples: 2}", "the key 'samples' occurs twice"),
        ("name: x\nformats: kv-overlay", "formats: must be a list, not 'kv-overlay'"),
        ("name: x\nquery_scale: maybe", "query_scale: must be auto, yes or no"),
        ("description: no name", "name: this key is missing"),
        ("name: x\ndata: {samples: true}", "data.samples: must be a valid integer, not True"),
        ('name: "\\ud800"', "cannot be written as UTF-8"),
        (
            "name: x\nquantize: {scheme: w8a16, layer_schemes: {a: w8a17}}",
            "quantize.layer_schemes.a: must be one of",
        ),
        ("name: x\nscales: {rule: guess}", "scales.rule: unknown rule 'guess'; known: amax"),
        ("name: x\nscales: {fallback: guess}", "scales.fallback: must be 'layer-max', 'one' or"),
        (
            "name: x\nobserve: {kv: false, query: false, inputs: false, weights: false}",
            "observe: nothing is observed",
        ),
        ("- x", "is not a mapping of keys"),
        ("name: [", "is not YAML: line 1, column 8"),
        ("name: \x07", "is not YAML: it contains characters that YAML does not allow"),
    ],
)
def test_what_is_wrong_is_told_with_its_key(text: str, told: str) -> None:
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, where="mine.yaml")
    assert caught.value.message.startswith("mine.yaml")
    assert told in caught.value.message


def test_shipped_recipes_are_named_like_their_files_and_described_in_their_first_line() -> None:
    for name, description in describe_recipes():
        recipe = load_recipe(name)
        assert (recipe.name, recipe.description) == (name, description)
        assert description


@pytest.mark.parametrize("pattern", ["self_attn", "re:self_attn", "model.layers.0", "*.SELF_ATTN"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(RecipeError, match="matches no module"):
        match_modules(("*.self_attn", pattern), MODULES)


def test_a_broken_regular_expression_is_an_error() -> None:
    with pytest.raises(RecipeError, match="not a regular expression"):
        match_modules(("re:[",), MODULES)
