"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.engines.registry import find_emulated, list_emulated
from fp8calib.errors import UsageError, suggest
from fp8calib.formats.registry import list_format_names
from fp8calib.options.option import Option
from fp8calib.options.recipe_keys import DATA

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from fp8calib.calibration.calibration_stats import CalibrationStats
    from fp8calib.results.calibrate import CalibrateResult

    Array: TypeAlias = np.ndarray[Any, Any]
else:  # only named, as importing them takes seconds
    _NAMES = ("Array", "Tensor", "PreTrainedModel", "CalibrateResult", "CalibrationStats")
    Array, Tensor, PreTrainedModel, CalibrateResult, CalibrationStats = (
        type(name, (), {}) for name in _NAMES
    )

Model: TypeAlias = str | Path | PreTrainedModel
"""A folder, a Hub id, or a model that is in memory."""
Stats: TypeAlias = str | Path | CalibrationStats | CalibrateResult
"""Statistics: the file, or what `load_stats` and `calibrate` return."""
TextData: TypeAlias = (
    str | Path | Iterable[str | Path | Tensor | Array | Sequence[int] | Mapping[str, Any]]
)
"""One spec (`--data`), several as paths, texts, token ids (1-D tensors or arrays, lists), or rows
as in JSONL."""
ProgressCallback: TypeAlias = Callable[[str, int, int | None], None]
"""Called with the name of a stage, the steps done, and all steps (None: unknown)."""

SKIP_LAYERS = "--kv-cache-dtype-skip-layers"
"""vLLM's option for layers whose KV cache stays in 16 bits."""
GATE_NAMES = ("kv", "w8a8")
"""The gates of `fp8calib.verification.judge.gates`, which imports torch."""


def check_gate(gate: str) -> None:
    """Refuse what is neither a gate nor a file."""
    if gate in GATE_NAMES or os.path.isfile(gate):  # noqa: PTH113 -- long names
        return
    raise UsageError(
        f"--gate {gate}: neither a gate ({', '.join(GATE_NAMES)}) nor a file",
        hint=suggest(gate, GATE_NAMES),
    )


def require_input(hint: str) -> Callable[[Path], None]:
    """Make the check that refuses a path that does not exist, unless it may be a Hub id."""

    def check(path: Path) -> None:
        if not may_be_on_hub(path):
            require_path(path, hint=hint)

    return check


check_stats = require_input("calibrate writes stats.safetensors")
DryRunOption = Annotated[bool, Option("--dry-run", help="Print the plan; run and write nothing.")]
ForceOption = Annotated[
    bool,
    Option(
        "--force", help="Overwrite earlier output; a folder with any other file is still refused."
    ),
]
CheckOption = Annotated[
    bool,
    Option(
        "--no-check",
        negates=True,
        help="Do not say what engines will do with the written checkpoints.",
    ),
]
UNQUANTIZED = Option(
    metavar="MODEL",
    reads=str,
    check=find_local_model,
    help="The unquantized model: folder or Hub id.",
)
_RUN = Option(
    metavar="MODEL",
    reads=str,
    check=find_local_model,
    help="The unquantized model: folder or Hub id. One in FP8, NVFP4, MXFP4, or INT4 or INT8 "
    "of compressed-tensors is dequantized while it is read.",
)
UnquantizedModel = Annotated[Model, UNQUANTIZED]
RunModel = Annotated[Model, _RUN]
RevisionOption = Annotated[
    str | None, Option("--revision", metavar="R", help="Branch, tag or commit on the Hub.")
]
TrustOption = Annotated[
    bool,
    Option("--trust-remote-code", help="Run the Python code that comes with the checkpoint."),
]

StatsOption = Annotated[
    Stats | None,
    Option(
        "--stats",
        metavar="STATS",
        reads=Path,
        check=check_stats,
        help="Statistics of a calibration, for the scales of inputs, K and V.",
    ),
]
BaseOption = Annotated[
    str | Path | None,
    Option(
        "--base",
        metavar="MODEL",
        reads=str,
        check=find_local_model,
        help="The calibrated model, where MODEL is quantized and the scales record no hashes of "
        "norms and embeddings.",
    ),
]
OtherWeightsOption = Annotated[
    bool,
    Option(
        "--other-weights",
        help="Accept a quantized MODEL with other norms or embeddings than the calibrated model "
        "(AWQ and SmoothQuant change norms).",
    ),
]
ReplaceScalesOption = Annotated[
    bool, Option("--replace-scales", help="Replace the KV scales that MODEL has.")
]

EngineOption = Annotated[
    str,
    Option(
        "--engine",
        metavar="NAME[==VERSION]",
        check=find_emulated,
        help=f"Engine to emulate: {', '.join(list_emulated())}.",
    ),
]
DataOption = Annotated[TextData | None, DATA]
TokenizerArgument = Annotated[
    Any,
    Option(
        only_in_python=True,
        help="For texts, and written beside a model in memory; None: that of the model.",
    ),
]
ProgressArgument = Annotated[
    ProgressCallback | None,
    Option(only_in_python=True, help="Called with stage, steps done and all steps (or None)."),
]
DeviceOption = Annotated[
    str, Option("--device", metavar="auto|cpu|cuda[:i]", help="Device to compute on.")
]
DtypeOption = Annotated[
    str,
    Option("--dtype", metavar="auto|float32|bfloat16|float16", help="Data type to compute in."),
]
DeviceMapOption = Annotated[
    str | None,
    Option("--device-map", metavar="auto", help="Spread the model over all GPUs."),
]
_UNITS_GIB = {"": 1.0, "m": 2.0**-10, "g": 1.0, "t": 2.0**10}
_SIZE = re.compile(
    r"(?P<number>[0-9]*\.?[0-9]+(?:e-?[0-9]+)?) ?(?P<unit>[mgt]?)(?:i?b)?", re.IGNORECASE
)


def read_gib(text: str, option: str = "--memory") -> float:
    """Read a size: `24`, `24GiB` and `24G` are 24 GiB, `500M` is 500 MiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"{option} {text}: not a size such as 24, 24GiB or 500M")
    return float(found["number"]) * _UNITS_GIB[found["unit"].lower()]


MemoryOption = Annotated[
    float | None,
    Option(
        "--memory",
        metavar="GIB",
        parser=read_gib,
        help="Memory limit of the process (24 is 24 GiB, 500M is 500 MiB); a model that needs more "
        "is streamed layer by layer. Default: what is available on the machine.",
    ),
]


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
