"""Plug-ins: packages that bring commands, formats of scales and engines, and nothing else.

A plug-in is an entry point of the group `fp8calib.plugins` whose object is a `Plugin`. What it
brings is named, not imported: `--help` lists the commands of all plug-ins without importing them.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

GROUP = "fp8calib.plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plug-in brings."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """A command as it is typed (`gptq`, `vllm check`) -> its module with a request, `run` and, if
    it prints more than its result's `str`, `describe`; or a package (`list_modules`)."""
    formats: tuple[str, ...] = ()
    """Places `MODULE:NAME` of a `fp8calib.formats.dialect.Dialect`."""
    engines: tuple[str, ...] = ()
    """Places `MODULE:NAME` of a `fp8calib.engines.engine.Engine`."""


@cache
def find_plugins() -> tuple[Mapping[str, Plugin], tuple[str, ...]]:
    """Import the registration module of every plug-in; one that fails is no error.

    Returns:
        The plug-ins by name, and why others are not usable.
    """
    plugins: dict[str, Plugin] = {}
    faults = []
    # Ours come first: another one of the same name does not replace them.
    points = sorted(
        _list_entry_points(),
        key=lambda point: (not point.value.startswith(f"{GROUP}."), point.name),
    )
    for point in points:
        where = f"{point.name} ({point.value})"
        try:
            found = point.load()
            needed: list[str] = []
            if isinstance(found, Plugin):
                needed += (list_modules(place)[0] for place in found.commands.values())
                needed += (each.partition(":")[0] for each in (*found.formats, *found.engines))
            missing = [place for place in needed if find_spec(place) is None]
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the code of others
            faults.append(f"{where}: {type(error).__name__}: {error}")
            continue
        if not isinstance(found, Plugin):
            faults.append(f"{where}: not a Plugin")
        elif missing:
            faults.append(f"{where}: there is no module {missing[0]}")
        elif point.name in plugins:
            faults.append(f"{where}: another plug-in has this name")
        else:
            plugins[point.name] = found
    return plugins, tuple(faults)


def list_modules(place: str) -> tuple[str, ...]:
    """List the modules of a command: itself, or those that a package may have, the request's first.

    With `command` apart from `request`, `--help` imports nothing that is slow.
    """
    spec = find_spec(place)
    if spec is None or spec.submodule_search_locations is None:
        return (place,)
    return tuple(f"{place}.{name}" for name in ("request", "command", "render"))


def _list_entry_points() -> Iterator[EntryPoint]:
    """List the entry points; where fp8calib is not installed, those of its own folder."""
    try:
        distribution("fp8calib")
    except PackageNotFoundError:
        for folder in sorted((Path(__file__).parent / "plugins").glob("*/__init__.py")):
            name = folder.parent.name
            yield EntryPoint(name, f"{GROUP}.{name}:PLUGIN", GROUP)
    yield from entry_points(group=GROUP)


def load_all(kind: Literal["formats", "engines"]) -> Iterator[Any]:
    """Import the formats or engines of all plug-ins; one that fails is left out with a warning."""
    for place in (p for found in find_plugins()[0].values() for p in getattr(found, kind)):
        module, _, name = place.partition(":")
        try:
            yield getattr(import_module(module), name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 -- the code of others
            why = f"{type(error).__name__}: {error}"
            warnings.warn(f"the plug-in at {place} cannot be used: {why}", stacklevel=2)
