"""FP8 calibration of Hugging Face language models.

The functions do what the commands of the same names do, on a path or on a model in memory. They are
imported when they are first used, so that `import fp8calib` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from fp8calib.commands import COMMANDS, find_module
from fp8calib.errors import (
    CalibrationError,
    DataError,
    ExportError,
    Fp8CalibError,
    Fp8CalibWarning,
    ModelError,
    RecipeError,
    ServerError,
    UsageError,
    VerificationError,
)

if TYPE_CHECKING:
    from fp8calib.commands.auto import AutoResult, auto
    from fp8calib.commands.calibrate import CalibrateResult
    from fp8calib.commands.calibrate_run import calibrate
    from fp8calib.commands.check import CheckResult, check
    from fp8calib.commands.dequantize import DequantizeResult, dequantize
    from fp8calib.commands.export import ExportResult, export
    from fp8calib.commands.extract_kv_scales import ExtractResult, extract_kv_scales
    from fp8calib.commands.quantize import QuantizeResult, quantize
    from fp8calib.commands.result import RunPlan
    from fp8calib.commands.show import show
    from fp8calib.commands.stats import CalibrationStats, load_stats
    from fp8calib.commands.verify_run import VerifyResult, verify
    from fp8calib.verification.emulated_model import emulate

__version__ = "0.3.0"

_PLACES = {
    "AutoResult": "commands.auto",
    "CheckResult": "commands.check",
    "CalibrationStats": "commands.stats",
    "CalibrateResult": "commands.calibrate",
    "DequantizeResult": "commands.dequantize",
    "emulate": "verification.emulated_model",
    "ExportResult": "commands.export",
    "ExtractResult": "commands.extract_kv_scales",
    "load_stats": "commands.stats",
    "QuantizeResult": "commands.quantize",
    "RunPlan": "commands.result",
    "VerifyResult": "commands.verify_run",
}

__all__ = [
    "AutoResult",
    "CalibrateResult",
    "CalibrationError",
    "CalibrationStats",
    "CheckResult",
    "DataError",
    "DequantizeResult",
    "ExportError",
    "ExportResult",
    "ExtractResult",
    "Fp8CalibError",
    "Fp8CalibWarning",
    "ModelError",
    "QuantizeResult",
    "RecipeError",
    "RunPlan",
    "ServerError",
    "UsageError",
    "VerificationError",
    "VerifyResult",
    "auto",
    "calibrate",
    "check",
    "dequantize",
    "emulate",
    "export",
    "extract_kv_scales",
    "load_stats",
    "quantize",
    "show",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name in _PLACES:
        return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)
    if name in COMMANDS:
        return getattr(find_module(name), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES, *__all__})
