"""docs/recipes.md lists every recipe and every key, and its example is a recipe."""

from __future__ import annotations

import re

from fp8calib.recipe import parse_recipe
from tests.cli.program import succeed
from tests.docs.pages import DOCS, compare_generated, make_table

PAGE = DOCS / "recipes.md"
MAKER = "tests/docs/test_recipes.py"


def test_the_page_lists_every_recipe() -> None:
    recipes = succeed("recipes", "--json").json["recipes"]
    rows = [[f"`{name}`", purpose] for name, purpose in recipes.items()]
    table = make_table(["recipe", "purpose"], rows)
    compare_generated(PAGE, table, maker=MAKER, name="recipes")


def test_the_page_explains_every_key() -> None:
    keys = succeed("recipes", "kv", "--json").json["schema"]
    rows = [
        [f"`{key}`", f"`{text['default']}`" if text["default"] else "", text["description"]]
        for key, text in keys.items()
    ]
    compare_generated(
        PAGE, make_table(["key", "default", "meaning"], rows), maker=MAKER, name="keys"
    )


def test_the_example_is_a_recipe() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = parse_recipe(example, where=PAGE.name)
    assert recipe.quantize is not None
    assert (recipe.name, recipe.quantize.rounding) == ("mine", "gptq")
