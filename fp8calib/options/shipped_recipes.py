"""The recipes that are part of fp8calib: YAML files whose first line describes them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# In a wheel, recipes are inside the package (see setup.py); in a clone, at its top level.
_IN_PACKAGE = Path(__file__).parents[1] / "recipes"
_IN_CLONE = Path(__file__).parents[2] / "recipes"


def recipe_files() -> dict[str, Path]:
    """List the shipped recipes, sorted by name: name -> YAML file."""
    folder = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CLONE
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe_recipes() -> Iterator[tuple[str, str]]:
    """Give the name of each shipped recipe and its description, which is the first line."""
    for name, path in recipe_files().items():
        yield (
            name,
            path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("description: "),
        )
