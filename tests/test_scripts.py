"""The scripts are consistent, and no tracked file contains a path of one machine."""

import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SCRIPTS = [
    *(p for p in sorted((ROOT / "scripts").iterdir()) if p.suffix in {"", ".sh"} and p.is_file()),
    ROOT / ".ci" / "run",
]
REPOSITORY_PATH = re.compile(r"(?<![\w/>-])(?:docs|fp8calib|scripts|tests)/[\w./-]*[\w/]")
ABSOLUTE_PATH = re.compile(rb"(?<![\w.~}])/(?:tmp|work|root|home|farm|Users)/[\w.-]+")


def _name(requirement: str) -> str:
    """Return a requirement's package name as PyPI normalizes it."""
    found = re.match(r"[\w.-]+?(?=[\s<>=!~;\[]|$)", requirement)
    assert found is not None, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_is_executable_and_its_bash_parses(script: Path) -> None:
    text = script.read_text()
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env ")
    if text.startswith("#!/usr/bin/env bash\n"):
        assert "\nset -euo pipefail\n" in text
        subprocess.run(["bash", "-n", str(script)], check=True)


def test_every_module_that_a_script_runs_exists() -> None:
    text = "".join(script.read_text() for script in SCRIPTS)
    modes = re.findall(r"--\w+(?= \||\))", (ROOT / "scripts" / "bench").read_text())
    assert "--quality" in modes
    named = [f"benchmarks.{name}" for name in ("calibrate", *(mode[2:] for mode in modes))]
    named += re.findall(r"-m scripts\.(fixtures\.\w+)", text)
    paths = [ROOT / "scripts" / f"{name.replace('.', '/')}.py" for name in named]
    assert [path for path in paths if not path.exists()] == []


def test_every_path_that_the_documentation_names_exists() -> None:
    pages = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "tests/README.md")]
    pages += sorted((ROOT / "docs").glob("*.md"))
    named = {name for page in pages for name in REPOSITORY_PATH.findall(page.read_text())}
    assert "fp8calib/engines/registry.py" in named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_dependency_named_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    named = {_name(r) for group in (project["dependencies"], *extras) for r in group}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[a-z0-9-]+==[\d.]+", pin)] == []
    assert named - {_name(pin) for pin in pins} == set()


def test_no_tracked_file_names_a_path_of_one_machine() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    paths = [ROOT / name for name in listed.stdout.decode().split("\0") if name]
    found = {
        str(path.relative_to(ROOT)): ABSOLUTE_PATH.findall(path.read_bytes())
        for path in paths
        if path.is_file()
    }
    assert {name: hits for name, hits in found.items() if hits} == {}
