"""Plug-ins: packages that bring commands, formats of scales and engines, and nothing else.

A plug-in is an entry point of the group `fp8calib.plugins` whose object is a `Plugin`. What it
brings is named, not imported: `--help` lists the commands of all plug-ins without importing them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from pathlib import Path
from typing import Any

GROUP = "fp8calib.plugins"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    """What a plug-in brings."""

    commands: Mapping[str, str] = field(default_factory=dict)
    """A command as it is typed (`gptq`, `vllm check`) -> the package with its modules `request` and
    `command`, and `render` where the command prints more than its result's `str`."""
    formats: tuple[str, ...] = ()
    """Places `MODULE:NAME` of a `fp8calib.dialects.dialect.Dialect`."""
    engines: tuple[str, ...] = ()
    """Places `MODULE:NAME` of a `fp8calib.engines.engine.Engine`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlugins:
    """The plug-ins by name, and why others are not usable."""

    plugins: Mapping[str, Plugin]
    faults: tuple[str, ...]


@cache
def find_plugins() -> FoundPlugins:
    """Import the registration module of every plug-in; one that fails is named, and is no error."""
    plugins: dict[str, Plugin] = {}
    faults = []
    for point in sorted(_list_entry_points(), key=lambda point: point.name):
        try:
            found = point.load()
        except Exception as error:  # noqa: BLE001 -- the code of others
            faults.append(f"{point.name} ({point.value}): {type(error).__name__}: {error}")
            continue
        if isinstance(found, Plugin):
            plugins[point.name] = found
        else:
            faults.append(f"{point.name} ({point.value}): not a Plugin")
    return FoundPlugins(plugins=plugins, faults=tuple(faults))


def _list_entry_points() -> Iterator[EntryPoint]:
    """List the entry points; where fp8calib is not installed, those of its own folder."""
    try:
        distribution("fp8calib")
    except PackageNotFoundError:
        for folder in sorted((Path(__file__).parent / "plugins").glob("*/__init__.py")):
            name = folder.parent.name
            yield EntryPoint(name, f"{GROUP}.{name}:PLUGIN", GROUP)
    yield from entry_points(group=GROUP)


def list_commands() -> dict[str, str]:
    """Map the commands of all plug-ins, as they are typed, to their packages."""
    found = find_plugins().plugins.values()
    return {typed: place for plugin in found for typed, place in plugin.commands.items()}


def load_formats() -> Iterator[Any]:
    """Import the formats of all plug-ins."""
    return (_load(place) for plugin in find_plugins().plugins.values() for place in plugin.formats)


def load_engines() -> Iterator[Any]:
    """Import the engines of all plug-ins."""
    return (_load(place) for plugin in find_plugins().plugins.values() for place in plugin.engines)


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
