"""Options that several commands share; those of a run of a model are in `run_options`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.commands.request import Option
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from fp8calib.calibration.calibration_stats import RunStats as CalibrationStats
    from fp8calib.commands.calibrate import CalibrateResult
else:  # only named, as importing them takes seconds
    _NAMES = ("PreTrainedModel", "CalibrateResult", "CalibrationStats")
    PreTrainedModel, CalibrateResult, CalibrationStats = (type(name, (), {}) for name in _NAMES)


def split_names(values: str | Sequence[str] | None) -> list[str] | None:
    """Split `a,b` into two names and drop repetitions; None stays None (not given)."""
    if values is None:
        return None
    values = [values] if isinstance(values, str) else values
    names = (name.strip() for value in values for name in value.split(","))
    return list(dict.fromkeys(filter(None, names)))


FP8_DTYPE = Option(
    "--fp8-dtype",
    f"FP8 format; default {E4M3FN.name}.",
    choices=tuple(KV_FORMATS),
    key="scales.fp8_dtype",
    key_default=E4M3FN.name,
)
FORMATS = Option(
    "--format NAME",
    f"To write; repeat for more: {', '.join(list_format_names())}.",
    reads=list[str],
    collect=split_names,
    check=find_dialect,
    key="formats",
    key_default=("kv-overlay",),
)
Model: TypeAlias = str | Path | PreTrainedModel
"""A folder, a Hub id, or a model that is in memory."""
Stats: TypeAlias = str | Path | CalibrationStats | CalibrateResult
"""Statistics: the file, or what `load_stats` and `calibrate` return."""
SKIP_LAYERS = "--kv-cache-dtype-skip-layers"
"""vLLM's option for layers whose KV cache stays in 16 bits."""


def require_input(path: Path, *, hint: str) -> None:
    """Refuse a path that does not exist, unless it may be a Hub id."""
    if not may_be_on_hub(path):
        require_path(path, hint=hint)


check_stats = partial(require_input, hint="calibrate writes stats.safetensors")
FORCE = Option("--force", "Overwrite earlier output; no folder with other files.")
CHECK = Option("--no-check", "Do not say what engines will do with what is written.", negates=True)
UNQUANTIZED = Option(
    "MODEL", "The unquantized model: folder or Hub id.", reads=str, check=find_local_model
)

REVISION = Option("--revision R", "Branch, tag or commit on the Hub.")
TRUST = Option("--trust-remote-code", "Run the Python code that comes with the checkpoint.")

STATS = Option(
    "--stats STATS",
    "Statistics of a calibration, for static scales.",
    reads=Path,
    check=check_stats,
)
OTHER_WEIGHTS = Option(
    "--other-weights",
    "Accept other norms, embeddings or linears than the calibrated model has "
    "(AWQ and SmoothQuant change norms).",
)
REPLACE_SCALES = Option("--replace-scales", "Replace the KV scales that MODEL has.")

TOKENIZER = Option("", "For texts, and written beside a model in memory; None: that of the model.")
PROGRESS = Option("", "Called with stage, steps done and all steps (or None).")


def spread_formats(arguments: Sequence[str]) -> list[str]:
    """Allow several names after one --format: `--format a b` becomes `--format a --format b`.

    Layers after `SKIP_LAYERS`, as vLLM takes them, are joined: `0 29` becomes `0,29`.
    """
    spread: list[str] = []
    in_formats = is_value = False
    for argument in arguments:
        if argument.isdecimal() and SKIP_LAYERS in spread[-2:-1]:
            spread[-1] += f",{argument}"
            continue
        if is_value:
            is_value = False
        elif in_formats and set(argument.split(",")) <= set(list_format_names()):
            spread.append("--format")
        else:
            is_value = argument == "--format"
            in_formats = is_value or argument.startswith("--format=")
        spread.append(argument)
    return spread
