"""Run calibration text through a model: the request, the result, and its lines."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import ConfigDict, Field, SkipValidation

from fp8calib.calibration.header import BackOff, Skipped
from fp8calib.commands import options as shared
from fp8calib.commands.magnitudes import summarize_briefly
from fp8calib.commands.option import Option
from fp8calib.commands.options import RecipeOptions, RunOptions, describe_recipes
from fp8calib.commands.quantize import QuantizeResult
from fp8calib.commands.result import (
    BeforeAfter,
    Overview,
    Record,
    Result,
    RunHashes,
    ShardIndex,
    WrittenCheck,
    describe_checks,
    list_top_level,
)
from fp8calib.commands.run_plan import MeasuredMemory, TextRows
from fp8calib.commands.saturation import NUM_QUARTERS, PositionSaturation, Saturation
from fp8calib.commands.show import describe_skipped, show_stats
from fp8calib.errors import ExportError
from fp8calib.formats.registry import list_written
from fp8calib.text import Answer, Block

if TYPE_CHECKING:
    from fp8calib.commands.stats import CalibrationStats
else:  # importing it takes seconds
    CalibrationStats = Any


@dataclass(frozen=True)
class CalibrateRequest(RunOptions, RecipeOptions):
    """Run calibration text through a model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """

    data: shared.DataOption = None
    _: KW_ONLY
    recipe: Annotated[
        str | Path,
        Option(
            "--recipe",
            metavar="NAME|FILE",
            reads=str,
            help="What to observe and write: a file or a name. "
            + " ".join(f"{name}: {purpose}" for name, purpose in describe_recipes()),
        ),
    ] = "kv"
    observe: Annotated[
        Collection[str] | None,
        Option(
            only_in_python=True,
            help="The kinds of tensors to observe: kv, query, inputs, weights; None: the recipe's.",
        ),
    ] = None
    out: Annotated[
        str | Path | None,
        Option(
            "--out",
            metavar="DIR",
            reads=Path,
            help="Output folder; default ./<model>-fp8calib.",
            about_argument="Output folder; None writes nothing.",
        ),
    ] = None
    device_map: shared.DeviceMapOption = None
    resume: Annotated[bool, Option("--resume", help="Continue an interrupted or killed run.")] = (
        False
    )
    shard: Annotated[
        str | None,
        Option(
            "--shard",
            metavar="I/N",
            help="Run only part I of N (from 1); `fp8calib export` joins all.",
        ),
    ] = None
    show_text: Annotated[
        int | None,
        Option(
            "--show-text",
            metavar="N",
            least=1,
            help="Print the first N sequences as the model sees them.",
        ),
    ] = None
    replace_scales: shared.ReplaceScalesOption = False
    check: shared.CheckOption = True
    force: shared.ForceOption = False
    tokenizer: shared.TokenizerArgument = None

    def on_command_line(self) -> CalibrateRequest:
        """Fill in the folder: the command always writes."""
        folder = f"{Path(str(self.model)).resolve().name}-fp8calib"
        return self if self.out is not None else replace(self, out=Path(folder))


class Coverage(Record):
    """What was observed, and what was not."""

    observed: int
    skipped: tuple[Skipped, ...]


class ExpertLayer(Record):
    """The tokens that reached the experts of a layer."""

    module: str
    min: int
    median: int | float
    max: int
    never_reached: tuple[int, ...]


class Experts(Record):
    """The tokens that reached experts, and the scale of those that none reached."""

    fallback: str
    layers: tuple[ExpertLayer, ...]


class NotQuantized(Record):
    """Why the recipe's FP8 checkpoint was not written."""

    scheme: str
    why: str


class CalibrateResult(Result):
    """The statistics of a calibration, and what `--json` prints of it, which is report.json too."""

    model_config = ConfigDict(arbitrary_types_allowed=True)
    left_out = ("shard", "quantize", "rules")

    stats: CalibrationStats = Field(exclude=True)
    was_finished: bool = Field(default=False, exclude=True)
    """Whether an earlier run had written all of it."""
    failure: str = Field(default="", exclude=True)
    """Why not all was written; empty if it was. It is among the warnings."""

    model: str
    command: str
    recipe: str
    data: tuple[str, ...]
    seq_len: int | None
    rows: SkipValidation[TextRows] | None
    measured_quantized: str
    architecture: str
    out: Path | None
    """None if nothing was written."""
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    tokens: int
    sequences: int
    shard: ShardIndex | None = None
    duration_s: float
    tokens_per_s: float
    dtype: str
    dtype_why: str
    device: str
    engine: str
    """What ran the text, its version and parallelism; empty for transformers."""
    memory: SkipValidation[MeasuredMemory]
    batch_size: int
    batch_back_off: tuple[BackOff, ...]
    resumed_sequences: int
    ranks: int
    rule: str
    rules: dict[str, str] | None = None
    """Those of the recipe for single K and V, by pattern."""
    coverage: Coverage
    saturation: Saturation | None
    positions: PositionSaturation | None
    expert_tokens: dict[str, list[int]]
    experts: Experts | None
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""
    warnings: tuple[str, ...]
    versions: dict[str, str]
    date: str
    """UTC, in the form of ISO 8601."""
    model_hash: str
    """Of the config and a sample of every tensor, however the weights are sharded."""
    data_hash: str
    """Of the token ids, pixels and samples of all sequences."""
    hashes: RunHashes | None = None
    """None if nothing was written."""
    quantize: QuantizeResult | NotQuantized | None = None
    """The checkpoint of a recipe that has one."""

    @property
    def passed(self) -> bool:
        """Whether all was written."""
        return not self.failure

    @property
    def exit_code(self) -> int:
        """That of an output that cannot be written, if one could not."""
        return 0 if self.passed else ExportError.exit_code

    @property
    def overlay(self) -> Path | None:
        """The first checkpoint with KV scales that was written; None if there is none."""
        overlays = (each.path() for each in list_written() if each.needs_model)
        written = (path for path in overlays if any(f.startswith(f"{path}/") for f in self.files))
        path = next(written, None)
        return None if self.out is None or path is None else self.out / path

    def overview(self) -> Overview:
        """Summarize the statistics, and name the files."""
        shown = self.stats.overview()
        written = [f"written to {self.out}: {', '.join(self.files)}"] if self.files else []
        return Overview(
            title=shown.title,
            columns=shown.columns,
            rows=shown.rows,
            notes=[*shown.notes, *written],
        )


def describe(result: CalibrateResult, request: CalibrateRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe what was measured, and the files."""
    if not result.was_finished:
        yield from map(Answer, _describe(result))


def _describe(result: CalibrateResult) -> Iterator[str]:
    now = result.sequences - result.resumed_sequences
    counted = f"{now} of them now, " if result.resumed_sequences else ""
    yield (
        f"{result.stats.header.describe_tokens()} in {result.sequences} sequences, {counted}"
        f"{result.duration_s:.1f} s ({result.tokens_per_s:,.0f} tokens/s), "
        f"{result.coverage.observed} tensors measured"
    )
    shown = show_stats(result.stats)
    yield from summarize_briefly(shown)
    yield from describe_skipped(shown)
    if result.saturation is not None and result.sequences >= NUM_QUARTERS:
        middle, least = result.saturation.median_share[1], result.saturation.least_share[1]
        yield (
            f"after half of the text the median tensor had reached {middle:.1%} of its final amax, "
            f"the slowest {least:.1%}"
        )
    yield from _describe_experts(result.experts)
    sizes = result.kv_bytes_per_token
    yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8"
    yield f"written to {result.out}: {list_top_level(result.files)}"
    if (shard := result.shard) is not None:
        yield (
            f"shard {shard.index} of {shard.count} has no scales. When all {shard.count} shards "
            "exist: fp8calib export SHARDS... --format kv-overlay --model MODEL --out DIR"
        )
    yield from describe_checks(result.checked)
    more = [f"fp8calib show {shlex.quote(str(result.out))}"]
    if result.overlay is not None:
        more.append(f"fp8calib check {shlex.quote(str(result.overlay))}")
    yield f"more: {'; '.join(more)}"


_SHOWN_LAYERS = 20
_FALLBACKS: Mapping[str, str] = {
    "layer-max": "they get the largest scale of the same role in their layer",
    "one": "they get scale 1.0",
    "refuse": "--fallback refuse: no scales are computed for them",
}


def _describe_experts(experts: Experts | None) -> Iterator[str]:
    """Describe the tokens that reached experts in a few lines."""
    if experts is None:
        return
    layers = experts.layers
    least, most = min(each.min for each in layers), max(each.max for each in layers)
    middle = median(each.median for each in layers)
    yield (
        f"tokens per expert: {least:,} to {most:,}, median {middle:,.0f}, in {len(layers)} layers"
    )
    unreached = [layer for layer in layers if layer.never_reached]
    if not unreached:
        return
    total = sum(len(layer.never_reached) for layer in unreached)
    yield f"{total} experts were never reached: {_FALLBACKS[experts.fallback]}"
    for layer in unreached[:_SHOWN_LAYERS]:
        yield f"  {layer.module}: {', '.join(map(str, layer.never_reached))}"
    if len(unreached) > _SHOWN_LAYERS:
        yield f"  and {len(unreached) - _SHOWN_LAYERS} more layers, see report.json"
