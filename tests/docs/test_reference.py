"""docs/reference.md lists every command, option, recipe and key; so does the page of Python."""

import re
from collections.abc import Iterator
from dataclasses import KW_ONLY
from pathlib import Path
from typing import Any

import pytest
import typer

import fp8calib
from fp8calib.cli.app import app
from fp8calib.commands import spell_commands
from fp8calib.commands.calibrate import CalibrateRequest
from fp8calib.commands.export import ExportRequest
from fp8calib.commands.options import describe_recipes
from fp8calib.commands.recipe import SECTIONS, Quantize, Recipe, load_recipe, parse_recipe
from fp8calib.commands.request import list_options, option, request_class
from fp8calib.errors import RecipeError
from fp8calib.model.module_paths import match_names
from scripts.python_page import make_page as make_python_page
from scripts.reference import Row, list_requests, make_commands
from tests.docs.pages import DOCS, compare_generated, make_table

PAGE = DOCS / "reference.md"
MAKER = "tests/docs/test_reference.py"


def test_the_page_lists_every_command_and_option() -> None:
    compare_generated(PAGE, make_commands(list_requests()), maker=MAKER, name="commands")


def test_the_commands_and_options_are_those_of_the_program() -> None:
    sections = dict(
        re.findall(r"^### ([a-z][a-z -]+)\n(.*?)(?=^### )", _read_commands(), re.M | re.S)
    )
    group: Any = typer.main.get_command(app)
    assert sections.keys() == spell_commands().keys()
    for name, text in sections.items():
        command = group
        for word in name.split():
            command = command.get_command(None, word)
        parameters = [each for each in command.params if each.opts[0].startswith("-")]
        spelled = {flag for each in parameters for flag in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"`(--[\w-]+)`", text)) >= spelled - {"--json"}, name


def _read_commands() -> str:
    return PAGE.read_text().split("## Commands", 1)[1]


def test_a_new_option_is_shown_with_its_value_bounds_default_and_help() -> None:
    @request_class
    class Wider(ExportRequest):
        """Join more.

        Example: fp8calib widen one --out two
        """

        _: KW_ONLY
        made_up: int = option("--made-up A|B", "What was made up.", default=3, least=1, most=9)

    text = make_commands({"widen": Wider})
    assert "### widen\n\nJoin more.\n\nExample: `fp8calib widen one --out two`" in text
    assert "| `--made-up` | `A`, `B`, 1 to 9 | What was made up. Default: `3`. |" in text
    assert "| `STATS...` |  |" in text
    assert "| `--out` | `DIR` | Required. Output folder. |" in text


def test_the_page_lists_every_recipe() -> None:
    rows = [[f"`{name}`", purpose] for name, purpose in describe_recipes()]
    table = make_table(["recipe", "purpose"], rows)
    compare_generated(PAGE, table, maker=MAKER, name="recipes")


def test_the_page_explains_every_key() -> None:
    """A key that is an option is explained there."""
    options = list_options(CalibrateRequest)
    flags = {option.help: f"as `{option.named}`" for option in options}
    rows = [
        [f"`{key}`", f"`{default}`" if default else "", flags.get(meaning, meaning)]
        for key, default, meaning in _describe_keys(Recipe)
    ]
    compare_generated(
        PAGE, make_table(["key", "default", "meaning"], rows), maker=MAKER, name="keys"
    )


def _describe_keys(section: Any, prefix: str = "", required: str = "required") -> Iterator[Row]:
    for name, field in section.model_fields.items():
        if not prefix and (inner := SECTIONS.get(name)) is not None:
            missing = "required" if field.default is not None else "null"
            yield from _describe_keys(inner, f"{prefix}{name}.", missing)
        else:
            default = required if field.is_required() else _spell(field.default)
            yield f"{prefix}{name}", default, field.description


def _spell(default: object) -> str:
    if isinstance(default, tuple):
        return f"[{', '.join(map(str, default))}]"
    if default is None or isinstance(default, bool):
        return {None: "null", True: "true", False: "false"}[default]
    return str(default)


def test_the_example_is_a_recipe() -> None:
    (example,) = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    recipe = parse_recipe(example, where=PAGE.name)
    assert recipe.quantize is not None
    assert recipe.name == "mine"


def test_the_page_of_python_has_every_argument_and_every_public_name() -> None:
    page = make_python_page()
    assert re.findall(r"^## (\S+)$", page, re.MULTILINE) == sorted(
        fp8calib.__all__, key=lambda name: (isinstance(getattr(fp8calib, name), type), name)
    )
    (export,) = re.findall(r"^## export\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    assert "    *,\n    recipe: str | Path | None = None,\n" in export
    assert "    formats: str | Sequence[str] | None = None,\n" in export
    assert "    force: bool = False,\n" in export
    assert ") -> ExportResult\n" in export
    assert "* `force`: Overwrite earlier output;" in export


# --- recipes -------------------------------------------------------------------------------------


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
