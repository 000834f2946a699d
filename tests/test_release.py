"""What is released works: source archive and wheel.

The wheel is built from the source archive and installed in an empty environment. Dependencies are
those of the environment that runs the tests, through a .pth file: nothing is downloaded.
"""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import fp8calib

ROOT = Path(__file__).parents[1]
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "constraints.txt")
WITHOUT_INDEX = {
    "PIP_NO_INDEX": "1",
    "PIP_NO_BUILD_ISOLATION": "0",
    "PIP_QUIET": "1",
    "PIP_NO_COMPILE": "1",
}
"""pip's options in the environment; 0 is how it spells `--no-build-isolation` there."""


def run(*command: object, cwd: Path, **environment: str) -> str:
    """Run a program outside the clone and return its stdout."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env=inherited | WITHOUT_INDEX | environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


def make_environment(folder: Path) -> Path:
    """Make an environment without any package, not even pip; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    return folder / "bin" / "python"


def add_dependencies(python: Path) -> None:
    """Let an environment import what the tests import."""
    (packages,) = python.parents[1].glob("lib/python*/site-packages")
    present = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    (packages / "dependencies.pth").write_text("\n".join(present) + "\n")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy what a build reads, and add a recipe that exists nowhere else."""
    root = tmp_path_factory.mktemp("source")
    for name in SOURCES:
        shutil.copy(ROOT / name, root / name)
    hidden = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "fp8calib", root / "fp8calib", ignore=hidden)
    shutil.copytree(ROOT / "recipes", root / "recipes")
    (root / "recipes" / "mine.yaml").write_text("name: mine\n")
    return root


@pytest.fixture(scope="module")
def archive(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("archive")
    run(sys.executable, "setup.py", "-q", "sdist", "--dist-dir", out, cwd=source)
    (path,) = out.glob("*.tar.gz")
    return path


@pytest.fixture(scope="module")
def wheel(archive: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", archive.parent)
    run(*pip, archive, cwd=archive.parent)
    (path,) = archive.parent.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = make_environment(tmp_path_factory.mktemp("installed") / "venv")
    pip = (sys.executable, "-m", "pip", "--python", found, "install", "--no-deps")
    run(*pip, wheel, cwd=wheel.parent)
    return found


def test_the_archive_contains_the_recipes_where_the_clone_has_them(archive: Path) -> None:
    with tarfile.open(archive) as tar:
        held = {name.partition("/")[2] for name in tar.getnames()}
    assert {"recipes/mine.yaml", "setup.py", "fp8calib/verification/page/page.css"} <= held
    assert "fp8calib/recipes/mine.yaml" not in held


def test_the_wheel_contains_every_file_of_the_package(wheel: Path) -> None:
    listed = subprocess.run(
        ["git", "ls-files", "fp8calib", "recipes"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    wanted = {name.replace("recipes/", "fp8calib/recipes/", 1) for name in listed.stdout.split()}
    with zipfile.ZipFile(wheel) as file:
        held = {name for name in file.namelist() if ".dist-info/" not in name}
    assert held == wanted | {"fp8calib/recipes/mine.yaml"}


def test_the_package_is_imported_without_a_dependency(python: Path, tmp_path: Path) -> None:
    code = "import fp8calib; print(fp8calib.__file__, fp8calib.__version__)"
    path, version = run(python, "-I", "-c", code, cwd=tmp_path).split()
    assert Path(path).is_relative_to(python.parents[1])
    assert version == fp8calib.__version__


def test_the_installed_program_runs(python: Path, tmp_path: Path) -> None:
    add_dependencies(python)
    program = python.parent / "fp8calib"
    assert run(program, "--version", cwd=tmp_path) == f"fp8calib {fp8calib.__version__}\n"
    told = " ".join(run(program, "calibrate", "--help", cwd=tmp_path).split())
    for name in ("mine", *(path.stem for path in (ROOT / "recipes").glob("*.yaml"))):
        assert f" {name}: " in told


def test_the_changelog_begins_with_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert re.findall(r"^## \[(.*?)\]", text, re.M)[0] == fp8calib.__version__
    newest = text.split("\n## ")[1]
    # A minute is some 250 words; a release that renames functions of Python has to list each.
    assert len(newest.split()) < 1250
