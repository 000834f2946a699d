"""Refuse names and files that do not exist before a command imports torch, which takes seconds."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.data.specs import parse_spec
from fp8calib.dialects.fp8.registry import find_written
from fp8calib.dialects.registry import find_dialect
from fp8calib.engines.registry import find_emulated, find_replayed
from fp8calib.errors import UsageError, join_or, suggest
from fp8calib.fp8.formats import FP8_FORMATS, KV_FORMATS
from fp8calib.fp8.schemes import GPTQ, NEAREST, find_scheme
from fp8calib.options.keys import split_names
from fp8calib.requests.shared import GATE_NAMES
from fp8calib.scales.rules import Fallback, parse_rule

_PATH_HINTS = {
    "path": "name a checkpoint folder or a JSON file",
    "quantized_model": "name a checkpoint folder or a file of scales",
    "stats": "calibrate writes stats.safetensors",
}
"""The fields that are one path, with the hint where there is none."""
_LOCAL_HINTS = {
    "file": "name statistics or scales",
    "shards": "name the output folder of a shard, or its stats.safetensors",
}
"""The same of paths that are never on the Hub, one or several."""


def refuse_missing(settings: Any) -> None:
    """Refuse unknown names and missing inputs before the libraries are imported, in seconds.

    What may be on the Hub is left to the command.

    Raises:
        UsageError: naming an option, a file or a folder.
        ModelError: naming a model.
        DataError: naming a data file.
    """
    _refuse_unknown_names(settings)
    for name in ("model", "base"):
        if (model := getattr(settings, name, None)) is not None:
            find_local_model(model)
    for name, hint in _PATH_HINTS.items():
        path = getattr(settings, name, None)
        if path is not None and not may_be_on_hub(path):
            require_path(path, hint=hint)
    for name, hint in _LOCAL_HINTS.items():
        found = getattr(settings, name, ())
        for path in found if isinstance(found, list | tuple) else [found]:
            require_path(path, hint=hint)
    for each in getattr(settings, "scales", ()):
        require_path(Path(each), option="--scales")
    for spec in getattr(settings, "data", None) or ():
        parse_spec(spec)


def _refuse_unknown_names(settings: Any) -> None:
    """Refuse settings whose value is no known name; the command checks what else they mean.

    Raises:
        UsageError: naming the option, and the names that are most like its value.
    """
    for name in split_names(getattr(settings, "formats", None)) or ():
        find_dialect(name)
    if (scheme := getattr(settings, "scheme", None)) is not None:
        known = find_scheme(scheme)
        if (dialect := getattr(settings, "dialect", None)) is not None:
            find_written(dialect, known)
    for name in (getattr(settings, "layer_schemes", None) or {}).values():
        find_scheme(name, option=f"--layer-scheme {name}")
    _check_engines(settings)
    if (rule := getattr(settings, "rule", None)) is not None:
        _check_rule(rule)
    for name in getattr(settings, "rules", None) or ():
        if name:
            parse_rule(name)
    fp8_formats = KV_FORMATS if hasattr(settings, "formats") else FP8_FORMATS
    _require(settings, "fp8_dtype", fp8_formats)
    _require(settings, "source_dtype", KV_FORMATS)
    _require(settings, "rounding", (NEAREST, GPTQ))
    _require(settings, "fallback", tuple(Fallback))
    _check_gate(getattr(settings, "gate", None))


def _require(settings: Any, field: str, known: Collection[str]) -> None:
    value = getattr(settings, field, None)
    if value is not None and value not in known:
        raise UsageError(
            f"--{field.replace('_', '-')} {value}: must be {join_or(list(known))}",
            hint=suggest(value, known),
        )


def _check_gate(gate: str | None) -> None:
    if gate is None or gate in GATE_NAMES or os.path.isfile(gate):  # noqa: PTH113 -- long names
        return
    raise UsageError(
        f"--gate {gate}: neither a gate ({', '.join(GATE_NAMES)}) nor a file",
        hint=suggest(gate, GATE_NAMES),
    )


def _check_engines(settings: Any) -> None:
    """Check the engines that `verify` and `auto` emulate, or whose loading `check` replays."""
    engine = getattr(settings, "engine", None) or ()
    is_emulated = isinstance(engine, str) or hasattr(settings, "rules")
    for value in [engine] if isinstance(engine, str) else engine:
        for name in value.split(","):
            (find_emulated if is_emulated else find_replayed)(name.strip())


def _check_rule(rule: str) -> None:
    try:
        parse_rule(rule)
    except UsageError as error:
        raise UsageError(f"--rule: {error.message}", hint=error.hint) from error
