"""The settings of `fp8calib quantize`: its options, not yet resolved."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.option_types import ForceOption, JsonOption, RevisionOption, UnquantizedModel
from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.dialects.fp8.registry import list_written
from fp8calib.fp8.schemes import SCHEMES


def _describe_schemes() -> Iterator[str]:
    return (f"{scheme.name}: {scheme.description}" for scheme in SCHEMES.values())


def _describe_dialects() -> Iterator[str]:
    """Name the dialects that can be written, and the schemes of those that cannot express all."""
    for dialect in list_written():
        only = "" if len(dialect.schemes) == len(SCHEMES) else f" ({', '.join(dialect.schemes)})"
        yield f"{dialect.name}{only}"


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """The command line."""

    model: UnquantizedModel
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="NAME",
            help=f"{'; '.join(_describe_schemes())}. Static inputs need --stats.",
        ),
    ]
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Output folder of the FP8 checkpoint.")
    ]
    stats: Annotated[
        Path | None,
        typer.Option(
            "--stats",
            metavar="STATS",
            help="Statistics of a calibration, for the scales of inputs, K and V.",
        ),
    ] = None
    dialect: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{', '.join(_describe_dialects())}.",
        ),
    ] = COMPRESSED_TENSORS.name
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="PATTERN",
            help="Leave a module and its submodules unquantized: a path, a glob, or re: and a "
            "regular expression that matches the whole path; repeat for more. Heads, embeddings, "
            "norms, routers, towers and projectors are never quantized.",
        ),
    ] = None
    no_shared_scales: Annotated[
        bool,
        typer.Option(
            "--no-shared-scales",
            help="With scales per tensor: give q, k and v, and gate and up, a weight scale each, "
            "and every expert its own input scale.",
        ),
    ] = False
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize",
            help="Accept a MODEL with FP8 weights: dequantize them first.",
        ),
    ] = False
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda[:i]",
            help="Device to compute on; auto is the CPU, which is faster than the disk.",
        ),
    ] = "auto"
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue an interrupted run after its last finished shard."),
    ] = False
    revision: RevisionOption = None
    force: ForceOption = False
    as_json: JsonOption = False
