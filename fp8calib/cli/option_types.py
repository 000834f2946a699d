"""Options that several commands share, and what typer's grammar lacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

FORMAT_NAMES = ("kv-overlay", "kv-overlay-head", "tgi", "kv-scales", "vllm-json", "rfc")

FormatOption = Annotated[
    list[str] | None,
    typer.Option("--format", metavar="NAME", help=f"What to write: {', '.join(FORMAT_NAMES)}."),
]
TpOption = Annotated[
    list[int] | None,
    typer.Option("--tp", metavar="N", help="Tensor-parallel degree of the JSON formats; repeat."),
]
RuleOption = Annotated[
    str | None,
    typer.Option(
        "--rule",
        metavar="NAME",
        help="Magnitude that a scale covers: amax (default), percentile:P, mse (least squared "
        "error) or headroom:H (H times amax). Of K, V and inputs; weights always use amax.",
    ),
]
FallbackOption = Annotated[
    str | None,
    typer.Option(
        "--fallback",
        metavar="NAME",
        help="Scale where none can be computed: layer-max, one or refuse.",
    ),
]
Fp8DtypeOption = Annotated[
    str | None,
    typer.Option("--fp8-dtype", metavar="NAME", help="e4m3fn (default) or e4m3fnuz."),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force", help="Replace the files this run writes; a folder that holds others is refused."
    ),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout, talk on stderr.")
]
RevisionOption = Annotated[
    str | None, typer.Option("--revision", metavar="R", help="Branch, tag or commit on the hub.")
]
TrustOption = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run the Python code a checkpoint carries.")
]

DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        metavar="SPEC",
        help="File (.jsonl .json .parquet .txt), folder, hub:NAME[:CONFIG][:SPLIT] or builtin; "
        "SPEC@WEIGHT mixes several. Default: builtin.",
    ),
]
SamplesOption = Annotated[
    int | None, typer.Option("--samples", metavar="N", min=1, help="Sequences; default 512.")
]
SeqLenOption = Annotated[
    int | None,
    typer.Option(
        "--seq-len", metavar="L", min=2, help="Tokens each; default min(2048, the model's)."
    ),
]
BatchSizeOption = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="B", min=1, help="Sequences at once; default 1."),
]
NoPackOption = Annotated[
    bool, typer.Option("--no-pack", help="Keep rows whole: cut, padded, the padding masked.")
]
DeviceOption = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda[:i]", help="Where to run.")
]
DtypeOption = Annotated[
    str,
    typer.Option("--dtype", metavar="auto|float32|bfloat16|float16", help="What to compute in."),
]
DeviceMapOption = Annotated[
    str | None,
    typer.Option("--device-map", metavar="auto", help="Spread the model over all GPUs."),
]
MemoryOption = Annotated[
    float | None,
    typer.Option(
        "--memory",
        metavar="GIB",
        help="What the process may take, all in all; a model that needs more is read layer by "
        "layer. Default: what the machine has left.",
    ),
]


def spread_formats(arguments: Sequence[str]) -> list[str]:
    """Let one --format take several names: `--format a b` becomes `--format a --format b`."""
    spread: list[str] = []
    in_formats = is_value = False
    for argument in arguments:
        if is_value:
            is_value = False
        elif in_formats and set(argument.split(",")) <= set(FORMAT_NAMES):
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
        raise typer.BadParameter("--format: no name given")
    return list(dict.fromkeys(name for name in names if name))
