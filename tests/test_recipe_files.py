"""The built-in recipes are found in a clone and travel in what is built from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fp8calib.recipe import recipe_files

ROOT = Path(__file__).parents[1]
PROMISED = {"kv", "w8a8-static", "w8a8-dynamic", "w8a16"}


def test_the_promised_recipes_are_there() -> None:
    assert recipe_files().keys() >= PROMISED


def test_a_recipe_is_named_like_its_file_at_the_top_of_the_clone() -> None:
    assert recipe_files() == {path.stem: path for path in (ROOT / "recipes").glob("*.yaml")}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy of what a build reads, with one recipe that exists nowhere else."""
    root = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        # A file that is not written yet is not what is tested here.
        (root / name).write_bytes((ROOT / name).read_bytes() if (ROOT / name).exists() else b"")
    shutil.copytree(ROOT / "fp8calib", root / "fp8calib")
    (root / "recipes").mkdir()
    (root / "recipes" / "mine.yaml").write_text("only: here\n")
    return root


def _build(source: Path, *command: str) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "-q", *command], cwd=source, check=True, capture_output=True
    )


def test_a_built_package_finds_the_recipes_it_carries(source: Path, tmp_path: Path) -> None:
    _build(source, "build_py", "--build-lib", str(tmp_path))
    code = "from fp8calib.recipe import recipe_files as f; print(*map(str, f().values()))"
    told = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    carried = tmp_path / "fp8calib" / "recipes" / "mine.yaml"
    assert told.stdout.split() == [str(carried)]
    assert carried.read_text() == "only: here\n"


def test_a_source_distribution_holds_the_recipes_where_the_clone_has_them(
    source: Path, tmp_path: Path
) -> None:
    _build(source, "sdist", "--dist-dir", str(tmp_path))
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {"recipes/mine.yaml", "setup.py"} <= held
    assert "fp8calib/recipes/mine.yaml" not in held
