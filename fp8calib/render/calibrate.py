"""What `calibrate` measured and wrote."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from statistics import median

from fp8calib.blocks import Answer, Block
from fp8calib.calibration.saturation import NUM_QUARTERS
from fp8calib.commands.show import describe_skipped, show_stats
from fp8calib.render.summary import summarize_briefly
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.results.calibrate import CalibrateResult, Experts
from fp8calib.results.written import describe_checks, list_top_level


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
        f"{result.coverage.observed} sites observed"
    )
    shown = show_stats(result.stats)
    yield from summarize_briefly(shown)
    yield from describe_skipped(shown)
    if result.saturation is not None and result.sequences >= NUM_QUARTERS:
        yield result.saturation.describe_half()
    yield from _describe_experts(result.experts)
    sizes = result.kv_bytes_per_token
    yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8"
    yield f"written to {result.out}: {list_top_level(result.files)}"
    if result.shard is not None:
        yield _describe_next(result.shard.index, result.shard.count)
    yield from describe_checks(result.checked)
    yield f"more: {'; '.join(_suggest_further(result))}"


def _describe_next(index: int, count: int) -> str:
    """Describe the next step after a shard."""
    return (
        f"shard {index} of {count} has no scales. When all {count} shards exist: "
        "fp8calib export SHARDS... --format kv-overlay --model MODEL --out DIR"
    )


def _suggest_further(result: CalibrateResult) -> Iterator[str]:
    """Spell the commands that print what these lines leave out."""
    yield f"fp8calib show {shlex.quote(str(result.out))}"
    if result.overlay is not None:
        yield f"fp8calib check {shlex.quote(str(result.overlay))}"


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
