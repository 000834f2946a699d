"""vLLM itself: calibration inside it, its own loader's verdict, what a running one holds.

In Python: `calibrate`, `check`, `audit(llm, path)` and `load_kv_scales(llm, scales)`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.plugin import Plugin

if TYPE_CHECKING:
    from fp8calib.plugins.vllm.commands.calibrate import calibrate
    from fp8calib.plugins.vllm.commands.check import check
    from fp8calib.plugins.vllm.live import audit, load_kv_scales

__all__ = ["PLUGIN", "audit", "calibrate", "check", "load_kv_scales"]

PLUGIN = Plugin(
    commands={
        f"vllm {name}": f"{__name__}.commands.{name}" for name in ("calibrate", "check", "audit")
    }
)
_PLACES = {
    "audit": "live",
    "load_kv_scales": "live",
    "calibrate": "commands.calibrate",
    "check": "commands.check",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
