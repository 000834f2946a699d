"""`recipes`: the list, one recipe, and the schema."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fp8calib.recipe import Recipe, load_recipe, parse_recipe, recipe_files
from tests.cli.program import fail, succeed

PROMISED = ["kv", "w8a8-static", "w8a8-dynamic", "w8a16"]


def test_the_list_names_every_recipe() -> None:
    lines = succeed("recipes").out.splitlines()
    assert {line.split()[0] for line in lines[2:] if line} == set(recipe_files())


def test_the_list_as_json_describes_every_recipe() -> None:
    recipes = succeed("recipes", "--json").json["recipes"]
    assert set(recipes) == set(recipe_files()) >= set(PROMISED)
    assert all(recipes.values())


@pytest.mark.parametrize("name", PROMISED)
def test_a_recipe_is_printed_with_every_key_explained(name: str) -> None:
    out = succeed("recipes", name).out
    for key in (
        "  #ignore: []",
        "  #seq_len: null",
        "\nscales:\n",
        "\nformats:",
        "\n#query_scale:",
    ):
        assert key in out
    assert all(len(line) <= 80 for line in out.splitlines() if "#" in line)
    parsed = parse_recipe(out, where="printed")
    assert parsed == parse_recipe(recipe_files()[name].read_text(), where=name)


def test_keys_after_a_hash_have_the_values_that_count_without_them() -> None:
    out = succeed("recipes", "w8a8-static").out
    everything = re.sub(r"(?m)^( *)#(?=\w)", r"\1", out)
    assert everything.count("\n  seq_len: null\n") == 1
    assert parse_recipe(everything, where="printed") == load_recipe("w8a8-static")


def test_a_printed_recipe_runs(model: Path, data: Path, tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(succeed("recipes", "kv").out)
    command = ("calibrate", model, "--data", data, "--recipe", path, "--dry-run", "--json")
    assert "kv-overlay" in succeed(*command).json["plan"]["writes"]


def test_values_of_the_users_own_are_printed_as_they_load(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "name: 'yes: #1'\ndata: {sources: ['a: b', 'c@2'], seed: 3}\nquery_scale: 'no'\n"
        "scales: {rule: 'percentile:99.9', fallback: one}\n"
        "quantize: {scheme: w8a16, layer_schemes: {'re:.*[0-9]': fp8-dynamic}}\n"
    )
    printed = succeed("recipes", path).out
    assert parse_recipe(printed, where="printed") == load_recipe(str(path))


def test_a_recipe_as_json_holds_its_values_and_the_schema() -> None:
    found = succeed("recipes", "w8a16", "--json").json
    assert found["recipe"]["observe"] == {
        "kv": False,
        "query": False,
        "inputs": False,
        "weights": True,
        "towers": False,
        "ignore": [],
    }
    assert found["schema"]["data.samples"] == {
        "default": "512",
        "description": "Number of sequences; default 512.",
    }
    assert all(item["description"] for item in found["schema"].values())


def test_a_file_of_the_users_own_is_shown_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntp: [1, 2]\n")
    shown = succeed("recipes", path, "--json").json["recipe"]
    assert Recipe.model_validate(shown) == Recipe(name="mine", tp=(1, 2))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("formats: [kv-overlai]", "formats: unknown format kv-overlai"),
        ("tp: [2, 0]", "tp: 0: a degree is a whole number from 1 up"),
    ],
)
def test_formats_and_degrees_of_a_recipe_are_its_own_faults(
    model: Path, data: Path, tmp_path: Path, line: str, message: str
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"name: mine\n{line}\n")
    calibrate = ("calibrate", model, "--data", data, "--out", tmp_path / "out")

    for command in (("recipes", recipe), (*calibrate, "--recipe", recipe)):
        text = fail(3, *command)
        assert f"{recipe}: {message}" in text
        assert ("did you mean kv-overlay?" in text) == line.startswith("formats")


def test_an_unknown_recipe_is_refused_with_the_names_there_are() -> None:
    text = fail(3, "recipes", "no-such-recipe")
    assert "no-such-recipe" in text
    assert all(name in text for name in PROMISED)
