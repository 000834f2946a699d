"""Every command and option that a message, help or docstring names exists."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from fp8calib.commands import find_request, spell_commands
from fp8calib.commands.request import list_options

PACKAGE = Path(__file__).parents[1] / "fp8calib"
COMMANDS = sorted(spell_commands(), key=len, reverse=True)
TYPED = re.compile(rf"fp8calib ({'|'.join(map(re.escape, COMMANDS))})\b([^\n`;:]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w-])")
BASE = {"--help", "--json", "--verbose", "--version", "--install-completion"}
OTHERS = {
    *("--allow-deprecated-quantization", "--calculate-kv-scales", "--context-length"),
    *("--kv-cache-dtype", "--logprobs-mode", "--max-model-len", "--quantization-param-path"),
    *("--llm_kv_type", "--use_fast_math", "--worker-extension-cls", "--nproc-per-node"),
    *("--upgrade", "--show-completion", "--model-path", "--enforce-eager", "--model_dir"),
    *("--disable-radix-cache", "--max-logprobs", "--tp-size", "--no-enable-prefix-caching"),
}
"""Of engines, compilers, torchrun, pip and typer."""


def list_texts(path: Path) -> Iterator[tuple[int, str]]:
    """List the strings of a module; a place in an f-string reads as X."""
    tree = ast.parse(path.read_text())
    inner = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.JoinedStr)
        for part in ast.walk(node)
        if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(e.value) if isinstance(e, ast.Constant) else "X" for e in node.values)
            yield node.lineno, "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield getattr(node, "lineno", 0), str(node.value)


def list_flags(command: str) -> set[str]:
    options = list_options(find_request(spell_commands()[command]))
    return {flag for option in options for flag in option.flags}


KNOWN = {command: list_flags(command) | BASE for command in COMMANDS}
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "removed"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_commands_and_options_that_texts_name_exist(path: Path) -> None:
    known = set.union(OTHERS, *KNOWN.values())
    for line, text in list_texts(path):
        for command, rest in TYPED.findall(text):
            assert set(FLAG.findall(rest)) <= KNOWN[command], f"line {line}: {command}{rest}"
        assert set(FLAG.findall(text)) <= known, f"line {line}: {text}"
