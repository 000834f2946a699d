"""GPTQ: weights are rounded layer by layer, so that later columns make up for earlier errors."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.gptq.command import gptq

__all__ = ["PLUGIN", "gptq"]

PLUGIN = Plugin(commands={"gptq": __name__})


def __getattr__(name: str) -> Any:
    if name != "gptq":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.command").gptq
