"""The commands. A module here is one: its request, its result, `run`, and `describe`.

`calibrate` and `verify` still have them in `fp8calib.requests`, `results` and `render`. A module
whose name begins with `_` is a part of a command.
"""

from __future__ import annotations

import ast
from importlib import import_module
from importlib.util import find_spec
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from fp8calib import plugin

_SHARED = "written"


def list_commands() -> list[str]:
    """List the commands of the core, as their modules and functions are named."""
    names = (each.name for each in iter_modules(__path__))
    return sorted(name for name in names if not name.startswith("_") and name != _SHARED)


def spell_commands() -> dict[str, str]:
    """Map all commands as they are typed to what the other functions of this module take.

    That is the name of `list_commands`, or the package of a plug-in.
    """
    own = {name.replace("_", "-"): name for name in list_commands()}
    return plugin.list_commands() | own  # none of ours is replaced


def _place(command: str, kind: str) -> str:
    """Give the module of a command that has its `request`, its `command` or its `render`."""
    if "." in command:
        place = f"{command}.{kind}"
        return place if find_spec(place) else f"{command}.request"
    folder = {"request": "requests", "render": "render"}.get(kind, "commands")
    place = f"fp8calib.{folder}.{command}"
    return place if find_spec(place) else f"{__name__}.{command}"


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
    """Import the module with the command's `run`; None if there is none."""
    module = import_module(_place(command, "command"))
    return module if hasattr(module, "run") else None


def find_render(command: str) -> ModuleType | None:
    """Import the module whose `describe` describes the command's result; None if there is none."""
    module = import_module(_place(command, "render"))
    return module if hasattr(module, "describe") else None
