"""Recipes are parsed and checked, their patterns resolved, and shipped ones found."""

from __future__ import annotations

from pathlib import Path

import pytest

from fp8calib.calibration.observe import Observe
from fp8calib.commands.options import describe_recipes, recipe_files
from fp8calib.commands.recipe import Recipe, load_recipe, parse_recipe
from fp8calib.errors import RecipeError
from fp8calib.model.module_paths import match_modules
from fp8calib.numerics.rules import AMAX, Fallback, Rule, RuleKind

ROOT = Path(__file__).parents[1]
PROMISED = {"kv", "w8a8-static", "w8a8-dynamic", "w8a16"}
MODULES = ["model.layers.0.self_attn", "model.layers.0.mlp.up_proj", "model.layers.10.self_attn"]


def test_a_name_is_enough() -> None:
    recipe = parse_recipe("name: mine", where="mine.yaml")
    assert recipe == Recipe(name="mine")
    assert recipe.observe == Observe(kv=True, query=True, inputs=True, weights=True, ignore=())
    assert (recipe.data.samples, recipe.data.seq_len, recipe.data.batch_size) == (512, None, None)
    assert (recipe.data.pack, recipe.data.seed) == (True, 0)
    assert (recipe.formats, recipe.tp) == (("kv-overlay",), (1,))
    assert recipe.scales.fallback is None
    assert recipe.scales.rule == AMAX


def test_every_section_is_read() -> None:
    text = """
name: mine
observe: {query: false, ignore: [a, "re:b"]}
data:
  {sources: [x.jsonl], text_column: body, samples: 3, seq_len: 9, batch_size: 2, pack: false,
   seed: 5, strict_rows: true}
scales: {rule: percentile:99.9, fallback: one, fp8_dtype: e4m3fnuz}
formats: [rfc, tgi]
tp: [1, 8]
query_scale: true
"""
    recipe = parse_recipe(text, where="mine.yaml")
    assert recipe.observe.ignore == ("a", "re:b")
    assert recipe.data.model_dump() == {
        "sources": ("x.jsonl",),
        "samples": 3,
        "seq_len": 9,
        "batch_size": 2,
        "text_column": "body",
        "pack": False,
        "seed": 5,
        "strict_rows": True,
    }
    assert recipe.scales.rule == Rule(RuleKind.PERCENTILE, 99.9)
    assert recipe.scales.model_dump()["rule"] == "percentile:99.9"
    assert (recipe.scales.fallback, recipe.scales.fp8_dtype) == (Fallback.ONE, "e4m3fnuz")
    assert (recipe.formats, recipe.tp, recipe.query_scale) == (("rfc", "tgi"), (1, 8), True)


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


@pytest.mark.parametrize(
    ("observe", "needs_forward"),
    [
        ({"kv": False, "query": False, "inputs": False}, False),
        ({"kv": False, "query": False}, True),
        ({"kv": False, "inputs": False}, True),
        ({"query": False, "inputs": False, "weights": False}, True),
    ],
)
def test_a_forward_pass_is_needed_unless_weights_are_all(
    observe: dict[str, bool], needs_forward: bool
) -> None:
    assert Observe(**observe).needs_forward is needs_forward


def test_the_hash_is_of_what_is_observed_alone() -> None:
    plain = Recipe(name="a")
    assert Recipe(name="b", formats=(), tp=(2,)).observe.hash == plain.observe.hash
    assert Recipe(name="a", observe=Observe(ignore=("x",))).observe.hash != (plain.observe.hash)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("model.layers.0.self_attn", {0}),
        ("*.self_attn", {0, 2}),
        ("model.layers.?.*", {0, 1}),
        (r"re:.*layers\.1.*", {2}),
        (r"re:.*\.(up|down)_proj", {1}),
    ],
)
def test_a_pattern_names_whole_paths(pattern: str, found: set[int]) -> None:
    assert match_modules((pattern,), MODULES) == {MODULES[index] for index in found}


@pytest.mark.parametrize("pattern", ["self_attn", "re:self_attn", "model.layers.0", "*.SELF_ATTN"])
def test_a_pattern_that_matches_nothing_is_an_error(pattern: str) -> None:
    with pytest.raises(RecipeError, match="matches no module"):
        match_modules(("*.self_attn", pattern), MODULES)


def test_a_broken_regular_expression_is_an_error() -> None:
    with pytest.raises(RecipeError, match="not a regular expression"):
        match_modules(("re:[",), MODULES)


def test_a_recipe_is_named_like_its_file_at_the_top_of_the_clone() -> None:
    assert recipe_files() == {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}
