"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Protocol

from fp8calib.data.specs import ACCEPTED_SUFFIXES
from fp8calib.dialects.registry import list_format_names, list_query_format_names
from fp8calib.errors import UsageError
from fp8calib.fp8.formats import E4M3FN, KV_FORMATS
from fp8calib.options.option import Option


class StatsInMemory(Protocol):
    """`fp8calib.CalibrationStats`, whose module imports torch."""

    @property
    def header(self) -> Any: ...  # noqa: D102


StatsLike = StatsInMemory | str | Path
"""Statistics, or the file or folder that holds them."""
FormatOption = Annotated[
    list[str] | None,
    Option(
        "--format",
        metavar="|".join(list_format_names()),
        help="What to write; several names, or repeat for more.",
    ),
]
TpOption = Annotated[
    list[int] | None,
    Option(
        "--tp", metavar="N", help="Tensor-parallel degree of the JSON formats; repeat for more."
    ),
]
RuleOption = Annotated[
    str | None,
    Option(
        "--rule",
        metavar="amax|percentile:P|mse|headroom:H",
        help="Rule for the scales of K, V and inputs: amax (default), percentile:P, mse (least "
        "squared error) or headroom:H (H times amax). Weights always use amax.",
    ),
]
FallbackOption = Annotated[
    str | None,
    Option(
        "--fallback",
        metavar="layer-max|one|refuse",
        help="Scale of a site for which none can be computed.",
    ),
]
Fp8DtypeOption = Annotated[
    str | None,
    Option(
        "--fp8-dtype",
        metavar="|".join(KV_FORMATS),
        help=f"FP8 format; default {E4M3FN.name}.",
    ),
]
QueryScaleOption = Annotated[
    str | None,
    Option(
        "--query-scale",
        metavar="auto|yes|no",
        help=f"Write q_scale too, in {', '.join(list_query_format_names())}; default auto: where q "
        "needs it in some layer.",
    ),
]
GATE_NAMES = ("kv", "w8a8")
"""The gates of `fp8calib.verification.judge.gates`, which imports torch."""
ForceOption = Annotated[
    bool,
    Option(
        "--force", help="Overwrite earlier output; a folder with any other file is still refused."
    ),
]
UnquantizedModel = Annotated[
    str, Option(metavar="MODEL", help="The unquantized model: folder or Hub id.")
]
RunModel = Annotated[
    str,
    Option(
        metavar="MODEL",
        help="The unquantized model: folder or Hub id. One in FP8, NVFP4, MXFP4, or INT4 or INT8 "
        "of compressed-tensors is dequantized while it is read.",
    ),
]
RevisionOption = Annotated[
    str | None, Option("--revision", metavar="R", help="Branch, tag or commit on the Hub.")
]
TrustOption = Annotated[
    bool,
    Option("--trust-remote-code", help="Run the Python code that comes with the checkpoint."),
]

BaseOption = Annotated[
    str | None,
    Option(
        "--base",
        metavar="MODEL",
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

DataOption = Annotated[
    list[str] | None,
    Option(
        "--data",
        metavar="SPEC",
        help=f"File ({' '.join(ACCEPTED_SUFFIXES)}), folder of files or of save_to_disk[:SPLIT], "
        "hub:NAME[:CONFIG][:SPLIT] or builtin; SPEC@WEIGHT mixes several. Default: builtin.",
    ),
]
TextColumnOption = Annotated[
    str | None,
    Option(
        "--text-column",
        metavar="NAME",
        help="Column of the rows to read: text, messages or token ids. Default: the first of text, "
        "messages, ... that there is.",
    ),
]
SAMPLES = Option("--samples", metavar="N", least=1, help="Number of sequences; default 512.")
SeqLenOption = Annotated[
    int | None,
    Option(
        "--seq-len",
        metavar="L",
        least=2,
        help="Tokens per sequence; default 2048, or the model's maximum if smaller.",
    ),
]
BATCH_SIZE = Option("--batch-size", metavar="B", least=1, help="Sequences per batch; default 1.")
NoPackOption = Annotated[
    bool,
    Option("--no-pack", help="One text per sequence, truncated or padded; padding is masked."),
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


def read_gib(text: str) -> float:
    """Read a size: `24`, `24GiB` and `24G` are 24 GiB, `500M` is 500 MiB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise UsageError(f"--memory {text}: is no size such as 24, 24GiB or 500M")
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
    """Allow several names after one --format: `--format a b` becomes `--format a --format b`."""
    spread: list[str] = []
    in_formats = is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif in_formats and set(argument.split(",")) <= set(list_format_names()):
            spread.append("--format")
        else:
            is_value = argument == "--format"
            in_formats = is_value or argument.startswith("--format=")
        spread.append(argument)
    return spread


def split_names(values: Sequence[str] | None) -> list[str] | None:
    """Split `a,b` into two names and drop repetitions; None stays None (not given)."""
    if values is None:
        return None
    names = [name.strip() for value in values for name in value.split(",")]
    if not any(names):
        raise UsageError("--format: no name given")
    return list(dict.fromkeys(name for name in names if name))
