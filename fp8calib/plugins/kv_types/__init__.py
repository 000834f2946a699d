"""The types of a KV cache beside FP8: what each costs, and how many tokens fit."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.kv_types.command import kv_types

__all__ = ["PLUGIN", "kv_types"]

PLUGIN = Plugin(commands={"kv-types": __name__})


def __getattr__(name: str) -> Any:
    if name != "kv_types":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.command").kv_types
