"""The request of `fp8calib quantize`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.dialects.fp8.compressed_tensors import COMPRESSED_TENSORS
from fp8calib.dialects.fp8.registry import find_written, list_written
from fp8calib.errors import UsageError
from fp8calib.numerics.schemes import SCHEMES, find_scheme
from fp8calib.options.option import Option
from fp8calib.requests import shared


def _describe_schemes() -> Iterator[str]:
    return (f"{scheme.name}: {scheme.description}" for scheme in SCHEMES.values())


def _describe_dialects() -> Iterator[str]:
    """Name the dialects that can be written, and the schemes of those that cannot express all."""
    for dialect in list_written():
        only = "" if len(dialect.schemes) == len(SCHEMES) else f" ({', '.join(dialect.schemes)})"
        yield f"{dialect.name}{only}"


def _read_layer_schemes(texts: Sequence[str]) -> dict[str, str]:
    """Read the names of schemes by pattern.

    Raises:
        UsageError: a scheme or a pattern is missing, or a pattern is given twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        pattern, _, scheme = text.rpartition("=")
        if not pattern or not scheme:
            raise UsageError(f"--layer-scheme {text}: must be PATTERN=SCHEME")
        if pattern in found:
            raise UsageError(f"--layer-scheme {pattern}: is given twice")
        found[pattern] = scheme
    return found


def _check_layer_schemes(by_pattern: Mapping[str, str]) -> None:
    for name in by_pattern.values():
        find_scheme(name, option=f"--layer-scheme {name}")


@dataclass(frozen=True, slots=True)
class QuantizeRequest:
    """Write an FP8 checkpoint shard by shard, without loading the model.

    Example: fp8calib quantize meta-llama/Llama-3.1-8B-Instruct --scheme fp8-dynamic --out llama-fp8
    """

    model: shared.UnquantizedModel
    scheme: Annotated[
        str,
        Option(
            "--scheme",
            metavar="|".join([*SCHEMES, "RECIPE"]),
            help=f"{'. '.join(_describe_schemes())}. Static inputs need --stats. "
            "Or a recipe, such as plan writes: a file with a section quantize.",
        ),
    ]
    out: Annotated[
        str | Path,
        Option("--out", metavar="DIR", reads=Path, help="Output folder of the FP8 checkpoint."),
    ]
    _: KW_ONLY
    stats: shared.StatsOption = None
    dialect: Annotated[
        str,
        Option(
            "--format",
            metavar="|".join(dialect.name for dialect in list_written()),
            help=f"{', '.join(_describe_dialects())}.",
        ),
    ] = COMPRESSED_TENSORS.name
    layer_schemes: Annotated[
        Mapping[str, str] | None,
        Option(
            "--layer-scheme",
            metavar="PATTERN=SCHEME",
            reads=list[str],
            collect=_read_layer_schemes,
            check=_check_layer_schemes,
            help="Another scheme for the linears that a pattern like those of --ignore matches; "
            "repeat for more: the first pattern that matches counts.",
        ),
    ] = None
    ignore: Annotated[
        Sequence[str] | None,
        Option(
            "--ignore",
            metavar="PATTERN",
            reads=list[str],
            help="Leave a module and its submodules unquantized: a path, a glob, or re: and a "
            "regular expression that matches the whole path; repeat for more. Heads, embeddings, "
            "norms, routers, towers and projectors are never quantized.",
        ),
    ] = None
    allow_unservable: Annotated[
        bool,
        Option(
            "--allow-unservable",
            help="Write the checkpoint even if vLLM and SGLang cannot load it.",
        ),
    ] = False
    dequantize: Annotated[
        bool,
        Option(
            "--dequantize",
            help="Accept a MODEL with FP8 weights: dequantize them first.",
        ),
    ] = False
    device: Annotated[
        str,
        Option(
            "--device",
            metavar="auto|cpu|cuda[:i]",
            help="Device to compute on; auto is the CPU, which is faster than the disk.",
        ),
    ] = "auto"
    resume: Annotated[
        bool,
        Option("--resume", help="Continue an interrupted run after its last finished shard."),
    ] = False
    revision: shared.RevisionOption = None
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None
    progress: shared.ProgressArgument = None

    def on_command_line(self) -> QuantizeRequest:
        """Refuse a scheme that the format cannot express."""
        if not self.names_recipe:
            find_written(self.dialect, find_scheme(self.scheme))
        return self

    @property
    def names_recipe(self) -> bool:
        """Whether the scheme is a recipe's."""
        return self.scheme.endswith((".yaml", ".yml"))
