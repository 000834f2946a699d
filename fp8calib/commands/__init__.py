"""The commands: a module here for each of `COMMANDS`; the others are what several of them share.

The module of a command has its request, its result, `run` and `describe`. It is imported with the
parser; what imports torch is imported in `run`, or is in a second module, such as `verify_run`. A
plug-in's command is such a module, or a package that has the same in the modules `request`,
`command` and `render`.
"""

from __future__ import annotations

import ast
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from fp8calib import plugin

COMMANDS = (
    *("auto", "calibrate", "check", "dequantize", "export", "extract_kv_scales"),
    *("quantize", "show", "verify"),
)
"""The commands of the core, as their modules and functions are named."""
SCHEMA_VERSION = 1
"""Version of the objects that --json prints; a key that goes or changes its meaning raises it."""


def spell_commands() -> dict[str, str]:
    """Map all commands as they are typed to what the other functions of this module take.

    That is a name of `COMMANDS`, or the module or the package of a plug-in.
    """
    own = {name.replace("_", "-"): name for name in COMMANDS}
    found = plugin.find_plugins()[0].values()
    added = {typed: place for each in found for typed, place in each.commands.items()}
    return {**own, **added, **own}


def _list_places(command: str) -> Sequence[str]:
    """List the modules that a command may have; its request is in the first one."""
    if command in COMMANDS:
        return f"{__name__}.{command}", f"{__name__}.{command}_run"
    return plugin.list_modules(command)


def find_module(command: str, needed: str = "run") -> ModuleType | None:
    """Import the first module of a command that has a function; None where none has."""
    modules = (import_module(place) for place in _list_places(command) if find_spec(place))
    return next((module for module in modules if hasattr(module, needed)), None)


def find_request(command: str) -> type:
    """Import the request of a command: the class of its module whose name ends in Request."""
    module = import_module(_list_places(command)[0])
    (found,) = (
        item
        for name, item in vars(module).items()
        if name.endswith("Request") and item.__module__ == module.__name__
    )
    assert isinstance(found, type)  # noqa: S101
    return found


def summarize_command(command: str) -> str:
    """Give the first line of a request's docstring, without importing the request."""
    place = _list_places(command)[0]
    loader: Any = find_spec(place).loader  # type: ignore[union-attr] # there is one
    classes = (
        each for each in ast.parse(loader.get_source(place)).body if isinstance(each, ast.ClassDef)
    )
    (found,) = (ast.get_docstring(each) for each in classes if each.name.endswith("Request"))
    assert found is not None  # noqa: S101
    return found.partition("\n")[0]
