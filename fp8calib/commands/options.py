"""Options that several commands share, and the requests that have those of a run."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias, get_args

from fp8calib.checkpoint.locations import find_local_model, may_be_on_hub, require_path
from fp8calib.commands.request import Option, ProgressCallback, option, request_class
from fp8calib.data.specs import ACCEPTED_SUFFIXES, Specs, parse_spec
from fp8calib.engines.registry import find_emulated, list_emulated
from fp8calib.errors import UsageError, suggest
from fp8calib.formats.registry import find_dialect, list_format_names
from fp8calib.machine import check_gib
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS
from fp8calib.numerics.rules import AMAX, Fallback, parse_rule

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor
    from transformers import PreTrainedModel

    from fp8calib.calibration.calibration_stats import RunStats as CalibrationStats
    from fp8calib.commands.calibrate import CalibrateResult

    Array: TypeAlias = np.ndarray[Any, Any]
else:  # only named, as importing them takes seconds
    _NAMES = ("PreTrainedModel", "CalibrateResult", "CalibrationStats", "Array", "Tensor")
    PreTrainedModel, CalibrateResult, CalibrationStats, Array, Tensor = (
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

DEFAULT_SEQ_LEN = 2048
_DEFAULT_SAMPLES = 512


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

DATA = Option(
    "--data SPEC",
    f"File ({' '.join(ACCEPTED_SUFFIXES)}), folder, hub:NAME[:CONFIG][:SPLIT] or builtin "
    "(default); SPEC@WEIGHT mixes several.",
    reads=list[str],
    collect=Specs,
    check=parse_spec,
    key="data.sources",
    key_default=(),
)
TEXT_COLUMN = Option(
    "--text-column NAME",
    "Column to read; default: text, messages, ...",
    key="data.text_column",
)
STRICT_ROWS = Option(
    "--strict-rows",
    "Fail at the first unusable row instead of skipping it.",
    key="data.strict_rows",
    key_default=False,
)
SAMPLES = Option(
    "--samples N",
    f"Number of sequences; default {_DEFAULT_SAMPLES}.",
    least=1,
    key="data.samples",
    key_default=_DEFAULT_SAMPLES,
)
SEQ_LEN = Option(
    "--seq-len L",
    f"Tokens each; default {DEFAULT_SEQ_LEN}, or the model's limit.",
    least=2,
    key="data.seq_len",
)
BATCH_SIZE = Option(
    "--batch-size B",
    "Batch; default 1 sequence, on GPUs 8,192 tokens.",
    least=1,
    key="data.batch_size",
)
PACK = Option(
    "--no-pack",
    "One text per sequence, cut or padded (masked).",
    negates=True,
    key="data.pack",
    key_default=True,
)
SEED = Option("--seed S", "Seed for mixing weighted data specs.", key="data.seed", key_default=0)
RULE = Option(
    "--rule amax|percentile:P|mse|headroom:H|1.0",
    "Rule for scales; default amax. mse: least squared error; headroom:H: H times amax.",
    check=parse_rule,
    key="scales.rule",
    key_default=AMAX,
)
FALLBACK = Option(
    "--fallback",
    "Scale of a tensor of zeros or without data. layer-max (default for zeros): the layer's "
    "largest, else 1.0.",
    choices=get_args(Fallback),
    key="scales.fallback",
)
TP = Option(
    "--tp N",
    "Tensor-parallel degree of JSON formats; repeat for more.",
    reads=list[int],
    key="tp",
    key_default=(1,),
)
QUERY_SCALE = Option(
    "--query-scale auto|yes|no",
    "Write q_scale; default auto: if a layer needs it.",
    key="query_scale",
    key_default="auto",
)


@request_class
class RecipeOptions:
    """What a calibration can be asked beside its recipe; None leaves the value of the recipe.

    A field here is an option of the command line, an argument in Python, and a key of recipes.
    """

    _: KW_ONLY
    text_column: str | None = option(TEXT_COLUMN, default=None)
    strict_rows: bool | None = option(STRICT_ROWS, default=None)
    formats: str | Sequence[str] | None = option(FORMATS, default=None)
    tp: int | Sequence[int] | None = option(TP, default=None)
    samples: int | None = option(SAMPLES, default=None)
    seq_len: int | None = option(SEQ_LEN, default=None)
    batch_size: int | None = option(BATCH_SIZE, default=None)
    pack: bool | None = option(PACK, default=None)
    seed: int | None = option(SEED, default=None)
    rule: str | None = option(RULE, default=None)
    fallback: str | None = option(FALLBACK, default=None)
    fp8_dtype: str | None = option(FP8_DTYPE, default=None)
    query_scale: str | None = option(QUERY_SCALE, default=None)


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


DRY_RUN = Option("--dry-run", "Print the plan; run and write nothing.")
ENGINE = Option(
    "--engine NAME[==VERSION]", f"To emulate: {', '.join(list_emulated())}.", check=find_emulated
)

DEVICE = Option("--device auto|cpu|cuda[:i]", "Device to compute on.")
DTYPE = Option("--dtype TYPE", "auto, float32, bfloat16 or float16.")
DEVICE_MAP = Option(
    "--device-map",
    "Spread the model over all GPUs; --memory does not count.",
    choices=("auto",),
)
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


MEMORY = Option(
    "--memory GIB",
    "Stream models above (24, 500M); default: what is free.",
    reads=str,
    check=check_gib,
    collect=read_gib,
)


@request_class
class RunOptions:
    """The model whose text runs, and where it runs."""

    if_quantized: ClassVar[str] = "calibrate the unquantized model it was made from"
    """What to do instead with a quantized model that cannot be decoded."""
    model: Model = option(
        "MODEL",
        "The unquantized model: folder or Hub id. FP8, NVFP4, MXFP4, INT4 and INT8 are "
        "dequantized.",
        reads=str,
        check=find_local_model,
    )
    _: KW_ONLY
    device: str = option(DEVICE, default="auto")
    dtype: str = option(DTYPE, default="auto")
    memory: float | None = option(MEMORY, default=None)
    dry_run: bool = option(DRY_RUN, default=False)
    revision: str | None = option(REVISION, default=None)
    trust_remote_code: bool = option(TRUST, default=False)
    progress: ProgressCallback | None = option(PROGRESS, default=None)

    def spell_model(self, name: str) -> str:
        """Spell the model, and the options without which it is another one, or cannot be opened.

        `name` is that of the model, for one in memory the folder that it is from.
        """
        words = [name, *(["--revision", self.revision] if self.revision is not None else [])]
        return shlex.join(words + ["--trust-remote-code"] * self.trust_remote_code)


@request_class
class TextOptions(RunOptions):
    """The model, where it runs, and which text runs through it."""

    _: KW_ONLY
    text_column: str | None = option(TEXT_COLUMN, default=None)
    strict_rows: bool = option(STRICT_ROWS, default=False)
    samples: int = option(SAMPLES, default=_DEFAULT_SAMPLES)
    seq_len: int | None = option(SEQ_LEN, default=None)
    batch_size: int = option("--batch-size B", "Sequences per batch.", least=1, default=1)
    pack: bool = option(PACK, default=True)


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
