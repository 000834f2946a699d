"""Where the recipes that come with the package stand."""

from __future__ import annotations

from pathlib import Path

# A wheel carries them inside the package (setup.py puts them there); a clone at its top.
_IN_PACKAGE = Path(__file__).parent / "recipes"
_IN_CLONE = Path(__file__).parents[1] / "recipes"


def recipe_files() -> dict[str, Path]:
    """Return the built-in recipes, name -> YAML file, in the order of their names."""
    folder = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CLONE
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}
