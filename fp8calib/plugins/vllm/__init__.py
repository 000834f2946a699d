"""vLLM itself: calibration inside it, its own loader's verdict, what a running one holds.

In Python: `calibrate`, `check`, `audit(llm, path)` and `load_kv_scales(llm, scales)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.vllm.commands.audit.command import audit
    from fp8calib.plugins.vllm.commands.calibrate.command import calibrate
    from fp8calib.plugins.vllm.commands.check.command import check
    from fp8calib.plugins.vllm.live import load_kv_scales

__all__ = ["PLUGIN", "audit", "calibrate", "check", "load_kv_scales"]

_COMMANDS = ("calibrate", "check", "audit")
PLUGIN = Plugin(commands={f"vllm {name}": f"{__name__}.commands.{name}" for name in _COMMANDS})
_FUNCTIONS = {"load_kv_scales": "live"} | {name: f"commands.{name}.command" for name in _COMMANDS}


def __getattr__(name: str) -> Any:
    if name not in _FUNCTIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_FUNCTIONS[name]}"), name)
