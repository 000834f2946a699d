"""The floors of the house: imports go down only, and heavy packages stay where they belong."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp8calib"

FLOORS = {
    4: {"cli", "__main__"},
    3: {"dialects", "verify", "quantize"},
    2: {"model", "data", "observe", "run", "calibrate"},
    1: {
        "recipe",
        "recipe_files",
        "stats",
        "scales",
        "saturation",
        "tensor_parallel",
        "provenance",
        "checkpoint",
        "devices",
        "fp8_cast",
        "geometry",
        "histogram",
        "histogram_shares",
        "machine_memory",
        "measured",
        "merging",
        "parts",
        "positions",
        "rules",
    },
    0: {"errors", "expert_stacks", "fp8", "launch", "sites", "__init__"},
}
FLOOR_OF = {name: floor for floor, names in FLOORS.items() for name in names}
MODEL_LIBRARIES = {"transformers", "datasets", "accelerate"}
HEAVY = MODEL_LIBRARIES | {"torch", "numpy", "safetensors", "pydantic"}
COMMAND_LINE_LIBRARIES = {"typer", "click", "rich"}


@dataclass(frozen=True)
class Import:
    """One imported module: who imports it, and whether importing the file is enough to."""

    file: str
    target: str
    is_deferred: bool

    @property
    def package(self) -> str:
        """The imported distribution's top name."""
        return self.target.partition(".")[0]

    @property
    def floor(self) -> int:
        """The importing file's floor."""
        return floor_of(self.file.removesuffix(".py").replace("/", "."))


def floor_of(module: str) -> int:
    """Give the floor of a module of the package, written without the package's name."""
    return FLOOR_OF[module.partition(".")[0]]


def module_files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> Iterator[Import]:
    name = path.relative_to(PACKAGE).as_posix()
    pending: list[tuple[ast.AST, bool]] = [(ast.parse(path.read_text()), False)]
    while pending:
        node, is_deferred = pending.pop()
        if isinstance(node, ast.Import):
            yield from (Import(name, alias.name, is_deferred) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports relatively"
            assert node.module is not None
            targets = [node.module]
            if node.module == "fp8calib":
                targets = [f"fp8calib.{alias.name}" for alias in node.names]
            yield from (Import(name, target, is_deferred) for target in targets)
        is_body = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        pending += [(child, is_deferred or is_body) for child in ast.iter_child_nodes(node)]


ALL = [found for path in module_files() for found in imports_of(path)]


@pytest.mark.parametrize("path", module_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_has_a_floor(path: Path) -> None:
    assert path.relative_to(PACKAGE).parts[0].removesuffix(".py") in FLOOR_OF


def test_no_arrow_points_up() -> None:
    up = [
        found
        for found in ALL
        if found.package == "fp8calib"
        and not found.target.startswith("fp8calib.__")
        and floor_of(found.target.removeprefix("fp8calib.")) > found.floor
    ]
    assert up == []


def test_only_the_second_floor_and_emulation_know_the_model_libraries() -> None:
    strangers = [
        found
        for found in ALL
        if found.package in MODEL_LIBRARIES
        and found.floor != 2
        and found.file != "verify/emulate.py"
        and not (found.floor == 4 and found.is_deferred)
    ]
    assert strangers == []


def test_importing_the_parser_pays_for_nothing_heavy() -> None:
    """What `import fp8calib.cli` reaches, deferred imports left out, holds no heavy package."""
    pending, reached = ["cli"], set[str]()
    heavy: list[Import] = []
    while pending:
        module = pending.pop()
        if module in reached:
            continue
        reached.add(module)
        file = PACKAGE.joinpath(*module.split("."))
        path = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
        for found in imports_of(path) if path.is_file() else ():
            if found.is_deferred:
                continue
            if found.package == "fp8calib":
                pending.append(found.target.removeprefix("fp8calib."))
            elif found.package in HEAVY:
                heavy.append(found)
    assert {"cli.app", "cli.calibrate_command", "cli.console", "errors"} <= reached
    assert heavy == []


def test_only_the_command_line_knows_its_libraries() -> None:
    strangers = [f for f in ALL if f.package in COMMAND_LINE_LIBRARIES and f.floor != 4]
    assert strangers == []


def test_only_the_console_knows_rich_and_nobody_click() -> None:
    assert {found.file for found in ALL if found.package == "rich"} == {"cli/console.py"}
    assert [found for found in ALL if found.package == "click"] == []


def test_the_bottom_floor_stands_on_the_standard_library_alone() -> None:
    bottom = {found.package for found in ALL if found.floor == 0}
    assert bottom & (HEAVY | COMMAND_LINE_LIBRARIES | {"yaml"}) == set()
