"""The order of the packages, and the libraries that each of them may import."""

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fp8calib
from fp8calib import commands
from tests import zoo
from tests.kit.apart import HEAVY, SLOW, run_apart, run_code

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fp8calib"


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


@pytest.mark.parametrize(
    ("modules", "allowed"),
    [
        (["fp8calib"], set[str]()),
        (["fp8calib.cli"], {"typer"}),
        # the file of a command has its result beside its request
        ([f"fp8calib.commands.{name}" for name in commands.COMMANDS], {"typer", "pydantic"}),
    ],
)
def test_importing_the_parser_pays_for_nothing_heavy(modules: list[str], allowed: set[str]) -> None:
    out, err = run_code(f"import sys, {', '.join(modules)}; print(*sys.modules.keys() & {HEAVY})")
    assert set(out.split()) <= allowed
    assert not err


def list_slow(*commands: tuple[object, ...]) -> list[str]:
    """Run commands in one process; give what of `SLOW` is imported after each."""
    found = run_apart(*commands)
    assert not [each.err for each in found if each.code not in {0, 8}]
    return [" ".join(SLOW.intersection(each.imported)) for each in found]


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
