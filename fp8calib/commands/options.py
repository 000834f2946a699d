"""Options that several commands share, keys of recipes among them, and how values are read."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeAlias

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.commands.option import Option
from fp8calib.data.specs import ACCEPTED_SUFFIXES, Specs, parse_spec
from fp8calib.engines.registry import find_emulated, list_emulated
from fp8calib.errors import UsageError, suggest
from fp8calib.formats.registry import (
    find_dialect,
    list_format_names,
    list_query_format_names,
)
from fp8calib.machine import check_gib
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS
from fp8calib.numerics.rules import AMAX, Fallback, parse_rule

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from fp8calib.calibration.calibration_stats import CalibrationStats
    from fp8calib.commands.calibrate import CalibrateResult

    Array: TypeAlias = np.ndarray[Any, Any]
else:  # only named, as importing them takes seconds
    _NAMES = ("Array", "Tensor", "PreTrainedModel", "CalibrateResult", "CalibrationStats")
    Array, Tensor, PreTrainedModel, CalibrateResult, CalibrationStats = (
        type(name, (), {}) for name in _NAMES
    )

DEFAULT_SEQ_LEN = 2048
_DEFAULT_SAMPLES = 512


def split_names(values: Sequence[str] | None) -> list[str] | None:
    """Split `a,b` into two names and drop repetitions; None stays None (not given)."""
    if values is None:
        return None
    names = [name.strip() for value in values for name in value.split(",")]
    if not any(names):
        raise UsageError("--format: no name given")
    return list(dict.fromkeys(name for name in names if name))


def _check_rule(text: str) -> None:
    try:
        parse_rule(text)
    except UsageError as error:
        raise UsageError(f"--rule: {error.message}", hint=error.hint) from error


DATA = Option(
    "--data",
    metavar="SPEC",
    reads=list[str],
    collect=Specs,
    check=parse_spec,
    key="data.sources",
    default=(),
    help=f"File ({' '.join(ACCEPTED_SUFFIXES)}), folder, hub:NAME[:CONFIG][:SPLIT] or builtin "
    "(default); SPEC@WEIGHT mixes several.",
)
TEXT_COLUMN = Option(
    "--text-column",
    metavar="NAME",
    key="data.text_column",
    help="Column to read; default: the first of text, messages, ... in the data.",
)
STRICT_ROWS = Option(
    "--strict-rows",
    key="data.strict_rows",
    default=False,
    help="Fail at the first row that cannot be used, instead of skipping it.",
)
SAMPLES = Option(
    "--samples",
    metavar="N",
    least=1,
    key="data.samples",
    default=_DEFAULT_SAMPLES,
    help=f"Number of sequences; default {_DEFAULT_SAMPLES}.",
)
SEQ_LEN = Option(
    "--seq-len",
    metavar="L",
    least=2,
    key="data.seq_len",
    help=f"Tokens per sequence; default {DEFAULT_SEQ_LEN}, or the model's maximum.",
)
BATCH_SIZE = Option(
    "--batch-size",
    metavar="B",
    least=1,
    key="data.batch_size",
    help="Sequences per batch; default 1, calibrating on a GPU 8,192 tokens.",
)
PACK = Option(
    "--no-pack",
    negates=True,
    key="data.pack",
    default=True,
    help="One text per sequence, truncated or padded (padding is masked).",
)
SEED = Option(
    "--seed",
    metavar="S",
    key="data.seed",
    default=0,
    help="Seed for mixing weighted data specs.",
)
RULE = Option(
    "--rule",
    metavar="amax|percentile:P|mse|headroom:H|1.0",
    check=_check_rule,
    key="scales.rule",
    default=AMAX,
    help="Rule for the scales of K, V and inputs; default amax. mse: the least squared error; "
    "headroom:H: H times amax.",
)
FALLBACK = Option(
    "--fallback",
    choices=tuple(Fallback),
    key="scales.fallback",
    help="Scale of a tensor of zeros or without data: layer-max, the largest of its role and "
    "layer, else 1.0 (default for zeros); one (1.0); or refuse.",
)
FP8_DTYPE = Option(
    "--fp8-dtype",
    choices=tuple(KV_FORMATS),
    key="scales.fp8_dtype",
    default=E4M3FN.name,
    help=f"FP8 format; default {E4M3FN.name}.",
)
FORMATS = Option(
    "--format",
    metavar="|".join(list_format_names()),
    reads=list[str],
    collect=split_names,
    check=find_dialect,
    key="formats",
    default=("kv-overlay",),
    help="What to write; several names, or repeat for more.",
)
TP = Option(
    "--tp",
    metavar="N",
    reads=list[int],
    key="tp",
    default=(1,),
    help="Tensor-parallel degree of the JSON formats; repeat for more.",
)
QUERY_SCALE = Option(
    "--query-scale",
    metavar="auto|yes|no",
    key="query_scale",
    default="auto",
    help=f"Write q_scale ({', '.join(list_query_format_names())}); default auto: if a layer needs "
    "it.",
)


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """What a calibration can be asked beside its recipe; None leaves the value of the recipe.

    A field here is an option of the command line, an argument in Python, and a key of recipes.
    """

    text_column: Annotated[str | None, TEXT_COLUMN] = None
    strict_rows: Annotated[bool | None, STRICT_ROWS] = None
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    tp: Annotated[int | Sequence[int] | None, TP] = None
    samples: Annotated[int | None, SAMPLES] = None
    seq_len: Annotated[int | None, SEQ_LEN] = None
    batch_size: Annotated[int | None, BATCH_SIZE] = None
    pack: Annotated[bool | None, PACK] = None
    seed: Annotated[int | None, SEED] = None
    rule: Annotated[str | None, RULE] = None
    fallback: Annotated[str | None, FALLBACK] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    query_scale: Annotated[str | None, QUERY_SCALE] = None


# In a wheel, recipes are inside the package (see setup.py); in a clone, at its top level.
_IN_PACKAGE = Path(__file__).parents[1] / "recipes"
_IN_CLONE = Path(__file__).parents[2] / "recipes"


def recipe_files() -> dict[str, Path]:
    """List the shipped recipes, sorted by name: name -> YAML file."""
    folder = _IN_PACKAGE if _IN_PACKAGE.is_dir() else _IN_CLONE
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def describe_recipes() -> Iterator[tuple[str, str]]:
    """Give the name of each shipped recipe and its description, which is the first line."""
    for name, path in recipe_files().items():
        yield (
            name,
            path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("description: "),
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
    Option("--force", help="Overwrite earlier output, but no folder with other files."),
]
CheckOption = Annotated[
    bool,
    Option(
        "--no-check",
        negates=True,
        help="Do not say what engines will do with what is written.",
    ),
]
UNQUANTIZED = Option(
    metavar="MODEL",
    reads=str,
    check=find_local_model,
    help="The unquantized model: folder or Hub id.",
)
UnquantizedModel = Annotated[Model, UNQUANTIZED]
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
        help=f"To emulate: {', '.join(list_emulated())}.",
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
    Option("--dtype", metavar="TYPE", help="auto, float32, bfloat16 or float16 to compute in."),
]
DeviceMapOption = Annotated[
    str | None,
    Option(
        "--device-map",
        choices=("auto",),
        help="Spread the model over all GPUs, whatever --device and --memory say.",
    ),
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
        check=check_gib,
        help="Limit (24, 500M); larger models are streamed. Default: what is free.",
    ),
]


@dataclass(frozen=True)
class RunOptions:
    """The model whose text runs, and where it runs."""

    if_quantized: ClassVar[str] = (
        "its activations have quantization errors already: calibrate the unquantized model it was "
        "made from"
    )
    """What to do instead with a quantized model that cannot be decoded."""
    model: Annotated[
        Model,
        Option(
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The unquantized model: folder or Hub id. One in FP8, NVFP4, MXFP4, INT4 or INT8 "
            "is dequantized while it is read.",
        ),
    ]
    _: KW_ONLY
    device: DeviceOption = "auto"
    dtype: DtypeOption = "auto"
    memory: MemoryOption = None
    dry_run: DryRunOption = False
    revision: RevisionOption = None
    trust_remote_code: TrustOption = False
    progress: ProgressArgument = None


@dataclass(frozen=True)
class TextOptions(RunOptions):
    """The model, where it runs, and which text runs through it."""

    _: KW_ONLY
    text_column: Annotated[str | None, TEXT_COLUMN] = None
    strict_rows: Annotated[bool, STRICT_ROWS] = False
    samples: Annotated[int, SAMPLES] = _DEFAULT_SAMPLES
    seq_len: Annotated[int | None, SEQ_LEN] = None
    batch_size: Annotated[int, BATCH_SIZE] = 1
    pack: Annotated[bool, PACK] = True


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
