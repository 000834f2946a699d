"""The requests of the commands. Every module here is a command, except for `shared`."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from fp8calib import plugin


def list_commands() -> list[str]:
    """List the commands of the core, as their modules and functions are named."""
    return sorted(each.name for each in iter_modules(__path__) if each.name != "shared")


def spell_commands() -> dict[str, str]:
    """Map all commands as they are typed to what the other functions of this module take.

    That is the name of `list_commands`, or the package of a plug-in.
    """
    own = {name.replace("_", "-"): name for name in list_commands()}
    return plugin.list_commands() | own  # none of ours is replaced


def _place(command: str, kind: str) -> str:
    """Give the module of a command: its `request`, its `command` or its `render`."""
    if "." in command:
        return f"{command}.{kind}"
    folder = {"request": "requests", "command": "commands", "render": "render"}[kind]
    return f"fp8calib.{folder}.{command}"


def find_request(command: str) -> type:
    """Import the request of a command: the class of its module whose name ends in Request."""
    module = import_module(_place(command, "request"))
    (found,) = (
        item
        for name, item in vars(module).items()
        if name.endswith("Request") and item.__module__ == module.__name__
    )
    assert isinstance(found, type)  # noqa: S101
    return found


def summarize(command: str) -> str:
    """Give the first line of a request's docstring, without importing the request."""
    place = _place(command, "request")
    loader: Any = find_spec(place).loader  # type: ignore[union-attr] # there is one
    classes = (
        each for each in ast.parse(loader.get_source(place)).body if isinstance(each, ast.ClassDef)
    )
    (found,) = (ast.get_docstring(each) for each in classes if each.name.endswith("Request"))
    assert found is not None  # noqa: S101
    return found.partition("\n")[0]


def find_implementation(command: str) -> ModuleType | None:
    """Import the module with the command's `run`; None if there is none.

    It is in `fp8calib.commands`, or in the module of the request if it imports nothing slow.
    """
    place = _place(command, "command")
    module = import_module(place if find_spec(place) else _place(command, "request"))
    return module if hasattr(module, "run") else None


def find_render(command: str) -> ModuleType | None:
    """Import the module that describes the command's result; None if there is none."""
    place = _place(command, "render")
    return import_module(place) if find_spec(place) else None
