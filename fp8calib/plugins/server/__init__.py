"""A running server beside the emulated candidates: which of them explains its answers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.server.command import server

__all__ = ["PLUGIN", "server"]

PLUGIN = Plugin(commands={"server": __name__})


def __getattr__(name: str) -> Any:
    if name != "server":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.command").server
