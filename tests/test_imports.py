"""The order of the packages, and the libraries that each of them may import."""

import ast
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import fp8calib
from fp8calib import commands
from tests import zoo

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp8calib"
MODEL_LIBRARIES = {"transformers", "datasets", "accelerate"}
COMMANDS = [f"commands.{name}" for name in commands.COMMANDS]
HEAVY = MODEL_LIBRARIES | {"torch", "numpy", "safetensors", "pydantic"}


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
        is_body |= isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        pending += [(child, is_deferred or is_body) for child in ast.iter_child_nodes(node)]


def check_contracts(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of `folder`'s pyproject.toml against the package in it."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"]
    command.append("--no-cache")
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_packages_import_each_other_in_one_direction() -> None:
    checked = check_contracts(ROOT)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("file", "line", "broken"),
    [
        (
            "numerics/formats.py",
            "import fp8calib.formats.compute",
            "Imports go down this list only",
        ),
        (
            "numerics/rules.py",
            "def load() -> None:\n    import transformers",
            "Only these packages know the model libraries",
        ),
    ],
)
def test_a_planted_import_breaks_the_contract(
    tmp_path: Path, file: str, line: str, broken: str
) -> None:
    shutil.copytree(PACKAGE, tmp_path / "fp8calib", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "fp8calib" / file).open("a") as planted:
        planted.write(f"\n{line}\n")
    checked = check_contracts(tmp_path)
    assert checked.returncode == 1
    assert f"{broken} BROKEN" in checked.stdout


# the file of a command has its result beside its request
@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (["cli"], set[str]()),
        ([*COMMANDS, "cli"], {"pydantic"}),
    ],
)
def test_importing_the_parser_pays_for_nothing_heavy(modules: list[str], allowed: set[str]) -> None:
    """What `import fp8calib.cli` reaches, deferred imports left out, holds no heavy package."""
    pending, reached = [*modules], set[str]()
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
            elif found.package in HEAVY - allowed:
                heavy.append(found)
    assert {"cli.app", "errors", *modules} <= reached
    assert modules == ["cli"] or "formats.registry" in reached
    assert heavy == []


SLOW = {"compressed_tensors", "torch", "transformers"}
PROGRAM = f"""
import json, sys
from fp8calib.cli import main_inner
for command in json.loads(sys.argv[1]):
    main_inner(command)
    print("imported:", *sorted(sys.modules.keys() & {SLOW}))
"""


def list_slow(*commands: tuple[object, ...]) -> list[str]:
    """Run commands in one process; give what of `SLOW` is imported after each."""
    asked = json.dumps([[str(word) for word in command] for command in commands])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("imported:")]
    return [line.removeprefix("imported:").strip() for line in lines]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a plain Llama, an FP8 one and an overlay; others are those of llm-compressor."""
    parent = tmp_path_factory.mktemp("folders")
    zoo.save("llama", plain := parent / "plain")
    fp8calib.quantize(plain, "fp8-dynamic", fp8 := parent / "fp8", check=False)
    foreign = ROOT / "tests" / "foreign"
    scales, overlay = foreign / "llmcompressor-kv", parent / "overlay"
    fp8calib.extract_kv_scales(scales, foreign / "llama", save_path=overlay, check=False)
    return {
        "plain": plain,
        "fp8": fp8,
        "overlay": overlay,
        "scales": scales,
        "dynamic": foreign / "llmcompressor-fp8-dynamic",
        "static": foreign / "llmcompressor-fp8-static-kv",
    }


def test_checkpoints_of_common_models_are_read_without_slow_libraries(
    folders: dict[str, Path],
) -> None:
    commands = [("check", folder) for folder in folders.values()]
    commands += [("show", folders[name]) for name in ("fp8", "overlay", "static")]
    assert list_slow(*commands) == [""] * len(commands)


def test_checkpoints_of_common_models_are_written_without_transformers(
    folders: dict[str, Path], tmp_path: Path
) -> None:
    quantize = ("quantize", folders["plain"], "--scheme", "fp8-dynamic", "--out", tmp_path / "fp8")
    extract = ("extract-kv-scales", "--quantized-model", folders["scales"])
    extract += ("--model", ROOT / "tests" / "foreign" / "llama", "--save-path", tmp_path / "kv")
    dequantize = ("dequantize", folders["fp8"], "--out", tmp_path / "plain")
    assert list_slow(quantize, extract, dequantize) == ["torch"] * 3


SHARED_NAMES = {
    "run": "what a command does",
    "describe": "the lines that a command prints",
    "main": "a program that is started",
}
"""Public names of several modules, and what each of them means everywhere."""


def test_a_public_name_has_one_meaning() -> None:
    places: dict[str, list[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(PACKAGE).as_posix())
    twice = {name: found for name, found in places.items() if len(found) > 1}
    assert twice.keys() == SHARED_NAMES.keys(), twice
