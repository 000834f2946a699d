"""FP8 calibration of Hugging Face language models.

The functions do what the commands of the same names do, on a path or on a model in memory. They are
imported when they are first used, so that `import fp8calib` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    from fp8calib.api.auto.report import AutoReport
    from fp8calib.api.auto.run import auto
    from fp8calib.api.calibrate import calibrate
    from fp8calib.api.export.run import Exported, export
    from fp8calib.api.quantize.run import Quantized, quantize
    from fp8calib.api.stats import CalibrationStats, load_stats
    from fp8calib.api.verify.run import verify
    from fp8calib.commands.card import card
    from fp8calib.commands.check import check
    from fp8calib.commands.engine_env import engine_env
    from fp8calib.commands.extract import extract_kv_scales
    from fp8calib.commands.merge import merge
    from fp8calib.commands.recipes import recipes
    from fp8calib.commands.show import show
    from fp8calib.results.card import CardResult
    from fp8calib.results.check import CheckResult
    from fp8calib.results.extract import ExtractResult
    from fp8calib.results.merge import MergeResult

__version__ = "0.2.0"

_PLACES = {
    "auto": "api.auto.run",
    "AutoReport": "api.auto.report",
    "calibrate": "api.calibrate",
    "card": "commands.card",
    "CardResult": "results.card",
    "CalibrationStats": "api.stats",
    "check": "commands.check",
    "CheckResult": "results.check",
    "engine_env": "commands.engine_env",
    "export": "api.export.run",
    "Exported": "api.export.run",
    "extract_kv_scales": "commands.extract",
    "ExtractResult": "results.extract",
    "load_stats": "api.stats",
    "merge": "commands.merge",
    "MergeResult": "results.merge",
    "recipes": "commands.recipes",
    "show": "commands.show",
    "quantize": "api.quantize.run",
    "Quantized": "api.quantize.run",
    "verify": "api.verify.run",
}

__all__ = [
    "AutoReport",
    "CalibrationError",
    "CalibrationStats",
    "CardResult",
    "CheckResult",
    "DataError",
    "ExportError",
    "Exported",
    "ExtractResult",
    "Fp8CalibError",
    "Fp8CalibWarning",
    "MergeResult",
    "ModelError",
    "Quantized",
    "RecipeError",
    "ServerError",
    "UsageError",
    "VerificationError",
    "auto",
    "calibrate",
    "card",
    "check",
    "engine_env",
    "export",
    "extract_kv_scales",
    "load_stats",
    "merge",
    "quantize",
    "recipes",
    "show",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_PLACES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_PLACES})
