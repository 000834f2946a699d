"""Run calibration text through a model: the request, the result, and its lines."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ConfigDict, Field

from fp8calib.commands import options as shared
from fp8calib.commands.request import option, request_class
from fp8calib.commands.result import (
    NUM_QUARTERS,
    BeforeAfter,
    Result,
    Saturation,
    WrittenCheck,
    describe_written,
)
from fp8calib.errors import ExportError, cut_list, format_count, name_ranges
from fp8calib.numerics.formats import E4M3FN
from fp8calib.text import Answer, Block

if TYPE_CHECKING:
    from fp8calib.commands.stats import CalibrationStats
else:  # importing it takes seconds
    CalibrationStats = Any


@request_class
class CalibrateRequest(shared.RunOptions, shared.RecipeOptions):
    """Run calibration text through a model and write FP8 scales that engines load.

    Example: fp8calib calibrate HuggingFaceTB/SmolLM2-135M-Instruct --data calib.jsonl
    """

    data: shared.TextData | None = option(shared.DATA, default=None)
    _: KW_ONLY
    recipe: str | Path = option(
        "--recipe NAME|FILE",
        "What to observe and write: file or name. "
        + " ".join(f"{name}: {purpose}" for name, purpose in shared.describe_recipes()),
        reads=str,
        default="kv",
    )
    observe: Collection[str] | None = option(
        "",
        "The kinds of tensors to observe: kv, query, inputs, weights; None: the recipe's.",
        default=None,
    )
    out: str | Path | None = option(
        "--out DIR", "Output folder; default ./<model>-fp8calib.", reads=Path, default=None
    )
    device_map: str | None = option(shared.DEVICE_MAP, default=None)
    resume: bool = option("--resume", "Continue an interrupted or killed run.", default=False)
    shard: str | None = option(
        "--shard I/N",
        "Run only part I of N (from 1); `export` joins all.",
        default=None,
    )
    show_text: int | None = option(
        "--show-text N",
        "Print N sequences as the model sees them.",
        default=None,
        least=1,
    )
    replace_scales: bool = option(shared.REPLACE_SCALES, default=False)
    check: bool = option(shared.CHECK, default=True)
    force: bool = option(shared.FORCE, default=False)
    tokenizer: Any = option(shared.TOKENIZER, default=None)

    def on_command_line(self) -> CalibrateRequest:
        """Fill in the folder: the command always writes."""
        folder = f"{Path(str(self.model)).resolve().name}-fp8calib"
        return self if self.out is not None else replace(self, out=Path(folder))


class CalibrateResult(Result):
    """The statistics of a calibration, and what `--json` prints of it, which is report.json too."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

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
    rows: dict[str, Any] | None
    """How many rows of the text were used."""
    measured_quantized: str
    architecture: str
    out: Path | None
    """None if nothing was written."""
    files: tuple[str, ...]
    """Relative to `out`, sorted."""
    tokens: int
    sequences: int
    shard: dict[str, int] | None = None
    """Its index, from 1, and the count of shards."""
    duration_s: float
    tokens_per_s: float
    dtype: str
    dtype_why: str
    device: str
    engine: str
    """What ran the text, its version and parallelism; empty for transformers."""
    memory: dict[str, Any]
    """The plan of `--dry-run`, and the peak that was measured."""
    batch_size: int
    batch_back_off: tuple[dict[str, int], ...]
    """Where batches had to become smaller: `first`, their first sequence, and `batch_size`."""
    resumed_sequences: int
    ranks: int
    rule: str
    rules: dict[str, str] | None = None
    """The recipe's rules for single K and V, by pattern."""
    coverage: dict[str, Any]
    """How many tensors were observed, and which were not and why."""
    saturation: Saturation | None
    expert_tokens: dict[str, list[int]]
    kv_bytes_per_token: BeforeAfter
    checked: tuple[WrittenCheck, ...] = ()
    """What `check` says of the written checkpoints; empty with --no-check."""
    warnings: tuple[str, ...]
    versions: dict[str, str]
    date: str
    """UTC, in the form of ISO 8601."""
    model_hash: str
    """Hash of the config and a sample of every tensor, however the weights are sharded."""
    data_hash: str
    """Hash of the token ids, pixels and audio samples of all sequences."""
    hashes: dict[str, Any] | None = None
    """None if nothing was written."""
    quantize: Any = None
    """The checkpoint of a recipe that has one, as `QuantizeResult`."""

    @property
    def exit_code(self) -> int:
        """0, or that of `ExportError` if an output could not be written."""
        return ExportError.exit_code if self.failure else 0


def describe(result: CalibrateResult, request: CalibrateRequest) -> Iterator[Block]:
    """Describe what was measured, and the files."""
    if result.was_finished:
        return
    header = result.stats.header
    now = result.sequences - result.resumed_sequences
    counted = f"{now} of them now, " if result.resumed_sequences else ""
    tokens = f"{result.tokens:,} tokens" if result.shard else header.describe_tokens()
    measured = (
        f"{tokens} in {format_count(result.sequences, 'sequence')}, {counted}"
        f"{result.duration_s:.1f} s ({result.tokens_per_s:,.0f} tokens/s), "
        f"{result.coverage['observed']} tensors measured"
    )
    yield Answer("; ".join([measured, *header.describe_skipped()]))
    notable = list(_describe_amax(result.stats.amax_table()))
    if result.saturation is not None and result.sequences >= NUM_QUARTERS:
        notable.append(result.saturation.describe())
    if unreached := [
        f"{path}.{expert}"
        for path, tokens in result.expert_tokens.items()
        for expert, count in enumerate(tokens)
        if not count
    ]:
        notable.append(
            f"{format_count(len(unreached), 'expert')} never reached (--fallback gives their "
            f"scales): {cut_list(unreached)}"
        )
    if notable:
        yield Answer("; ".join(notable))
    written, *checked = describe_written(result.out, result.files, result.checked)
    yield Answer(f"{written.text}; {result.kv_bytes_per_token.describe_kv_cache()}")
    if result.shard is not None:
        count = result.shard["count"]
        yield Answer(
            f"shard {result.shard['index']} of {count} has no scales. When all {count} shards "
            "exist: `fp8calib export SHARDS --format kv-overlay --model MODEL --out DIR`"
        )
    yield from (Answer(each.text) for each in checked)
    scales = shlex.quote(str(result.out))
    more = [f"fp8calib show {scales}"]
    if any(name.startswith("kv-overlay") for name in result.files):
        more.append(f"fp8calib verify {request.spell_model(result.model)} --scales {scales}")
    yield Answer(f"more: {'; '.join(more)}")


def _describe_amax(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Give the range of the amax of K, V and q, and what clips at scale 1.0."""
    ranges, clipping = [], []
    for role in ("k", "v", "q"):
        known = [row for row in rows if row["role"] == role and row["amax"]]
        if not known:
            continue
        least, most = (pick(known, key=lambda row: row["amax"]) for pick in (min, max))
        ranges.append(f"{role} {least['amax']:,.3g} to {most['amax']:,.4g} (layer {most['layer']})")
        if above := sorted({row["layer"] for row in known if row["amax"] > E4M3FN.max}):
            clipping.append(f"{role} of {name_ranges(above)}")
    if ranges:
        yield f"amax of layers: {', '.join(ranges)}"
    if clipping:
        yield f"above {E4M3FN.max:g}, which clips at scale 1.0: {', '.join(clipping)}"
