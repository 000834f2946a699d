"""Copy the KV scales of a quantized checkpoint or file to another model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from fp8calib.checkpoint.locations import find_local_model
from fp8calib.commands import options as shared
from fp8calib.commands.command_line import slow_imports
from fp8calib.commands.option import Option
from fp8calib.commands.options import FORMATS, FP8_DTYPE
from fp8calib.commands.result import (
    BeforeAfter,
    Overview,
    Record,
    Result,
    WrittenCheck,
    describe_checks,
    list_top_level,
)
from fp8calib.jobs.function import as_function
from fp8calib.jobs.reporter import Reporter
from fp8calib.numerics.formats import KV_FORMATS
from fp8calib.text import Block, Line

Numbers = float | tuple[float, ...]
"""One number, or one for each rank or head."""


@dataclass(frozen=True, slots=True)
class ExtractRequest:
    """Copy the KV scales of a quantized checkpoint to its unquantized model.

    Example: fp8calib extract-kv-scales --quantized-model llama-fp8 --model llama --save-path out
    """

    quantized_model: Annotated[
        str | Path,
        Option(
            "--quantized-model",
            metavar="PATH",
            reads=Path,
            check=shared.require_input("name a checkpoint folder or a file of scales"),
            help="Checkpoint folder or Hub id, or file (.safetensors .json .npz), with KV scales.",
        ),
    ]
    model: Annotated[
        str | Path,
        Option(
            "--model",
            metavar="MODEL",
            reads=str,
            check=find_local_model,
            help="The unquantized model, or a quantized checkpoint of it (an overlay keeps "
            "its quantization): folder or Hub id.",
        ),
    ]
    save_path: Annotated[
        str | Path,
        Option(
            "--save-path --out",
            metavar="DIR",
            reads=Path,
            help="Output folder: a checkpoint, or the folder of one file, by --format.",
        ),
    ]
    _: KW_ONLY
    formats: Annotated[str | Sequence[str] | None, FORMATS] = None
    base: shared.BaseOption = None
    other_weights: shared.OtherWeightsOption = False
    replace_scales: shared.ReplaceScalesOption = False
    source_dtype: Annotated[
        str | None,
        Option(
            "--source-dtype",
            choices=tuple(KV_FORMATS),
            help="FP8 format that the scales were made for, if the files do not state it.",
        ),
    ] = None
    fp8_dtype: Annotated[str | None, FP8_DTYPE] = None
    tp: Annotated[
        list[int] | None,
        Option(
            "--tp",
            metavar="N",
            help="Tensor-parallel degree of the JSON formats; repeat for more. Default: that of "
            "the source.",
        ),
    ] = None
    revision: shared.RevisionOption = None
    trust_remote_code: shared.TrustOption = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False


class ExtractedLayer(Record):
    """The scales of a layer as written."""

    layer: int
    module: str
    k: Numbers
    v: Numbers
    q: Numbers | None = None


class ExtractResult(Result):
    """The scales that were written, and who serves them: what `--json` prints."""

    save_path: Path
    files: tuple[str, ...]
    """Relative to `save_path`, sorted."""
    dialect: str
    """Of the source."""
    source_dtype: str
    format: str
    fp8_dtype: str
    tp: int | tuple[int, ...]
    taken_from: tuple[str, ...]
    """The source's files, each as folder and file name."""
    layers: tuple[ExtractedLayer, ...]
    notes: tuple[str, ...]
    compared: str = ""
    """Which linears of a quantized model are those of the calibrated one, in words."""
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""

    def to_json(self) -> dict[str, Any]:
        """Make the object that `--json` prints; a layer without q has no key for it."""
        return {**super().to_json(), **self.model_dump(mode="json", exclude_none=True)}

    def overview(self) -> Overview:
        """Summarize what was written."""
        return Overview(
            title=f"{self.format} in {self.save_path}: {len(self.layers)} layers of "
            f"{self.dialect} scales",
            notes=[
                *self.notes,
                *map(str, self.checked),
            ],
        )


def run(request: ExtractRequest, reporter: Reporter) -> ExtractResult:
    """Read the scales, and write them in the requested format.

    Raises:
        UsageError: an option is invalid, or the source does not state its FP8 format.
        ModelError: the unquantized model cannot be read.
        ExportError: the format cannot hold the scales, or cannot be written.
        ModelError: the source's scales are incomplete, invalid, or of another model.
    """
    with slow_imports():
        from fp8calib.commands._extract_kv_scales import extract
    result = extract(request)
    for note in result.notes:
        reporter.warn(note)
    return result


def describe(result: ExtractResult, request: ExtractRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe the scales, where they are, and who serves them."""
    sizes = result.kv_bytes_per_token
    yield Line(f"{result.dialect} scales of {len(result.layers)} layers, {result.fp8_dtype}")
    yield Line(f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8")
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    yield Line(f"written to {result.save_path}: {list_top_level(result.files)}")
    yield from map(Line, describe_checks(result.checked))


extract_kv_scales = as_function("extract_kv_scales", ExtractRequest, run)
