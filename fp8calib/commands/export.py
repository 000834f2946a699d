"""Write the scales of statistics in any format."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.option import Option
from fp8calib.commands.options import FALLBACK, FORMATS, FP8_DTYPE, QUERY_SCALE, RULE, TP
from fp8calib.commands.result import Overview, Result, WrittenCheck, describe_checks, list_top_level
from fp8calib.errors import format_count
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.text import Block, Line


@dataclass(frozen=True, slots=True)
class ExportRequest:
    """Write the scales of a calibration in other formats or for other tensor-parallel degrees.

    Example: fp8calib export out/stats.safetensors --format rfc vllm-json --tp 2 --out tp2
    """

    stats: Annotated[
        shared.Stats | Sequence[shared.Stats],
        Option(
            metavar="STATS...",
            reads=list[Path],
            check=shared.check_stats,
            help="stats.safetensors of a calibration, or its folder. Several are the shards of one "
            "run: they are joined, and stats.safetensors of the run is written too, or only that "
            "without --format.",
        ),
    ]
    out: Annotated[str | Path, Option("--out", metavar="DIR", reads=Path, help="Output folder.")]
    _: KW_ONLY
    recipe: Annotated[
        str | Path | None,
        Option(
            "--recipe",
            metavar="FILE",
            reads=str,
            help="A recipe whose rules and formats are used, such as that of `fp8calib plan`.",
        ),
    ] = None
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    tp: Annotated[int | Sequence[int] | None, TP] = None
    model: Annotated[
        shared.Model | None,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The calibrated model, or a quantized checkpoint of it (an overlay "
            "keeps its quantization); needed for overlays and weights.",
        ),
    ] = None
    base: shared.BaseOption = None
    other_weights: shared.OtherWeightsOption = False
    replace_scales: shared.ReplaceScalesOption = False
    rule: Annotated[str | None, RULE] = None
    fallback: Annotated[str | None, FALLBACK] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    query_scale: Annotated[str | None, QUERY_SCALE] = None
    with_weights: Annotated[
        bool,
        Option(
            "--with-weights",
            help="With --format rfc and --model: also write the FP8 weights of every rank. MODEL "
            "may then be int4 (compressed-tensors, symmetric, one scale per tensor), and the JSON "
            "holds the compound scales.",
        ),
    ] = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None


class ExportResult(Result):
    """The files that were written, and what a user should know: what `--json` prints."""

    out: Path
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    warnings: tuple[str, ...]
    shards: tuple[str, ...] = ()
    """The statistics that were joined; empty for those of one run."""
    compared: str = ""
    """Which linears of a quantized model are those of the calibrated one, in words."""
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""

    def overview(self) -> Overview:
        """Summarize what was written."""
        commands = map(str, self.checked)
        counted = "1 file" if len(self.files) == 1 else f"{len(self.files)} files"
        return Overview(
            title=f"{counted} in {self.out}: {', '.join(self.files)}",
            notes=[*self.warnings, *commands],
        )


def run(request: ExportRequest, reporter: Reporter) -> ExportResult:
    """Write the scales of statistics in every requested format; no model runs.

    Raises:
        UsageError: an option is invalid, or the folder is in use.
        RecipeError: the recipe is invalid, or a pattern of it matches nothing.
        ModelError: the statistics are damaged, or not all shards of one run; or the model cannot be
            read, or is another one.
        ExportError: a scale cannot be computed, or a format not written.
    """
    with slow_imports():
        from fp8calib.commands._export import export_scales
    result = export_scales(request)
    for text in result.warnings:
        reporter.warn(text)
    return result


def describe(result: ExportResult, request: ExportRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe where the files are, and what engines do with them."""
    if result.shards:
        yield Line(f"joined {format_count(len(result.shards), 'shard')}")
    yield Line(f"written to {result.out}: {list_top_level(result.files)}")
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    yield from map(Line, describe_checks(result.checked))


export = as_function("export", ExportRequest, run)
