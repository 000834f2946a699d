"""What texts of the product name: commands, options, and hints that say to use them."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from fp8calib.commands import find_request, spell_commands
from fp8calib.commands.request import list_options

PACKAGE = Path(__file__).parents[2] / "fp8calib"
MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path.stem != "removed"]
COMMANDS = sorted(spell_commands(), key=len, reverse=True)
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9_-]*[a-z0-9](?![\w-])")

_HINT = re.compile("hint|fix", re.IGNORECASE)
_SAYS = re.compile(r"`fp8calib |\b(use|add|leave out) --")


@cache
def list_flags(command: str) -> set[str]:
    options = list_options(find_request(spell_commands()[command]))
    return {flag for each in options for flag in each.flags}


OWN_FLAGS = frozenset().union(*map(list_flags, COMMANDS))


def list_texts(tree: ast.AST) -> Iterator[tuple[ast.Constant | ast.JoinedStr, str]]:
    """List the strings of a module; a place in an f-string reads as {}."""
    inner: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            inner |= {id(part) for part in ast.walk(node) if part is not node}
            parts = (str(e.value) if isinstance(e, ast.Constant) else "{}" for e in node.values)
            yield node, "".join(parts)
        elif isinstance(node, ast.Constant) and id(node) not in inner:
            yield node, str(node.value)


def list_hints(path: Path) -> Iterator[str]:
    """List the texts of a module that say to use an option or a command of fp8calib.

    They are named as hints or fixes, or say so in the words that `read_hint` reads.
    """
    tree = ast.parse(path.read_text())
    hints, others = set(), set()
    for node in ast.walk(tree):
        parts = {id(part) for part in ast.walk(node)} if _is_about_texts(node) else set()
        if isinstance(node, ast.keyword | ast.Assign):
            hints |= parts
        else:  # docstrings, and the help of options
            others |= parts
    for node, text in list_texts(tree):
        says = _SAYS.search(text) or (id(node) in hints and " " in text.strip())
        names = {*FLAG.findall(text)} & OWN_FLAGS or "`fp8calib " in text
        if says and names and id(node) not in others:
            yield text


def _is_about_texts(node: ast.AST) -> bool:
    if isinstance(node, ast.keyword):
        return node.arg in {"hint", "fix"}
    if isinstance(node, ast.Assign):
        return _HINT.search(ast.unparse(node.targets[0])) is not None
    if isinstance(node, ast.Call):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        return name.endswith(("option", "Option"))
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
