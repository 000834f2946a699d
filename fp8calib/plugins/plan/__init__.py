"""Plans under a budget: which scheme for which layers, which rules of K and V, what stays plain."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.plan.command import plan

__all__ = ["PLUGIN", "plan"]

PLUGIN = Plugin(commands={"plan": __name__})


def __getattr__(name: str) -> Any:
    if name != "plan":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.command").plan
