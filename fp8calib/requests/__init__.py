"""The requests of the commands. Every module here is a command, except for `shared`."""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any


def list_commands() -> list[str]:
    """List the commands, as their modules and functions are named."""
    return sorted(each.name for each in iter_modules(__path__) if each.name != "shared")


def spell_commands() -> dict[str, str]:
    """Map the commands as they are typed to the names of `list_commands`."""
    return {name.replace("_", "-"): name for name in list_commands()}


def find_request(command: str) -> type:
    """Import the request of a command: the class of its module whose name ends in Request."""
    module = import_module(f"{__name__}.{command}")
    (found,) = (
        item
        for name, item in vars(module).items()
        if name.endswith("Request") and item.__module__ == module.__name__
    )
    assert isinstance(found, type)  # noqa: S101
    return found


def summarize(command: str) -> str:
    """Give the first line of a request's docstring, without importing the request."""
    place = f"{__name__}.{command}"
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
    place = f"fp8calib.commands.{command}"
    module = import_module(place if find_spec(place) else f"{__name__}.{command}")
    return module if hasattr(module, "run") else None
