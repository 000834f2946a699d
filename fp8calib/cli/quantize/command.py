"""`fp8calib quantize`: the options, and nothing heavy before they are parsed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from fp8calib.cli.heavy_imports import heavy_imports
from fp8calib.cli.option_types import ForceOption, JsonOption, RevisionOption
from fp8calib.fp8.schemes import SCHEMES, list_expressible


def _describe_schemes() -> Iterator[str]:
    return (f"{scheme.name}: {scheme.description}" for scheme in SCHEMES.values())


def _describe_dialects() -> Iterator[str]:
    """Name the checkpoint dialects, and the schemes of those that cannot express all."""
    for dialect in dict.fromkeys(name for each in SCHEMES.values() for name in each.dialects):
        schemes = list_expressible(dialect)
        only = "" if len(schemes) == len(SCHEMES) else f" ({', '.join(schemes)})"
        yield f"{dialect}{only}"


def quantize_command(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Folder or hub id of the unquantized model.")
    ],
    scheme: Annotated[
        str,
        typer.Option(
            "--scheme",
            metavar="NAME",
            help=f"{'; '.join(_describe_schemes())}. Static inputs need --stats.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The FP8 checkpoint to write.")],
    stats: Annotated[
        Path | None,
        typer.Option(
            "--stats", metavar="STATS", help="What calibrate wrote: scales of inputs, K and V."
        ),
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help=f"{', '.join(_describe_dialects())}.",
        ),
    ] = "compressed-tensors",
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            "--ignore",
            metavar="PATTERN",
            help="Leave a module and what is in it unquantized: its path, a glob, or re: and an "
            "expression for the whole path; repeat. Heads, embeddings, norms, routers, towers and "
            "projectors are left out already.",
        ),
    ] = None,
    no_shared_scales: Annotated[
        bool,
        typer.Option(
            "--no-shared-scales",
            help="Per tensor: a weight scale for each of q, k, v, of gate and up, and an input "
            "scale for each expert.",
        ),
    ] = False,
    dequantize: Annotated[
        bool,
        typer.Option(
            "--dequantize",
            help="Read the FP8 weights of a MODEL that is quantized already back on the way.",
        ),
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="auto|cpu|cuda[:i]",
            help="Where to compute; auto is the CPU, which outruns the disk.",
        ),
    ] = "auto",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on after the last shard an interrupted run finished."),
    ] = False,
    revision: RevisionOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write an FP8 checkpoint, shard by shard: no class of the model, no memory for it.

    Example: fp8calib quantize meta-llama/Llama-3.1-8B-Instruct --scheme fp8-dynamic --out llama-fp8
    """
    with heavy_imports():
        from fp8calib.cli.quantize.run import QuantizeSettings, run_quantize  # noqa: PLC0415

    run_quantize(
        QuantizeSettings(
            model=model,
            scheme=scheme,
            out=out,
            stats=stats,
            form=form,
            ignore=tuple(ignore or ()),
            shares_scales=not no_shared_scales,
            dequantize=dequantize,
            device=device,
            resume=resume,
            revision=revision,
            force=force,
            as_json=as_json,
        )
    )
