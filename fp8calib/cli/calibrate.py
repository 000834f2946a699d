"""Print what `fp8calib calibrate` measured and wrote, or its plan."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median

from fp8calib.cli.console import (
    ConsoleReporter,
    list_top_level,
    print_json,
    print_text,
    prints_json,
    say,
    show,
    show_error,
)
from fp8calib.cli.serving import describe_serving_briefly
from fp8calib.cli.setup import quiet_libraries
from fp8calib.commands.calibrate import run
from fp8calib.commands.show import show_stats
from fp8calib.errors import ExportError
from fp8calib.machine.launch import find_process_rank
from fp8calib.render.plan import describe_plan
from fp8calib.render.show import describe_skipped
from fp8calib.render.summary import summarize_briefly
from fp8calib.requests.calibrate import CalibrateRequest
from fp8calib.results.calibrate import CalibrateResult, Experts
from fp8calib.results.plan import RunPlan


def run_calibrate(request: CalibrateRequest) -> int:
    """Calibrate a model, print the outcome, and return the exit code."""
    quiet_libraries()
    if request.out is None:
        folder = f"{Path(str(request.model)).resolve().name}-fp8calib"
        request = replace(request, out=Path(folder))
    with ConsoleReporter() as reporter:
        result = run(request, reporter, find_process_rank(os.environ))
    if isinstance(result, RunPlan):
        if prints_json():
            print_json(result.to_json())
        show(describe_plan(result, "plan (nothing was run or written)"))
    elif result is not None:
        return _show(result, request)
    return 0


def _show(result: CalibrateResult, request: CalibrateRequest) -> int:
    if prints_json():
        print_json(result.to_json())
    if result.was_finished:
        return 0
    tell = say if prints_json() else print_text
    for text in _describe(result, request):
        tell(text)
    if result.passed:
        return 0
    code = ExportError.exit_code
    return show_error(ExportError.kind, result.failure, "", as_json=False, exit_code=code)


def _describe(result: CalibrateResult, request: CalibrateRequest) -> Iterator[str]:
    now = result.sequences - result.resumed_sequences
    counted = f"{now} of them now, " if result.resumed_sequences else ""
    yield (
        f"{result.tokens:,} tokens in {result.sequences} sequences, {counted}"
        f"{result.duration_s:.1f} s ({result.tokens_per_s:,.0f} tokens/s), "
        f"{result.coverage.observed} sites observed"
    )
    shown = show_stats(result.stats)
    yield from summarize_briefly(shown)
    yield from describe_skipped(shown)
    if result.saturation is not None:
        yield result.saturation.describe_half()
    yield from _describe_experts(result.experts)
    sizes = result.kv_bytes_per_token
    yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8"
    yield f"written to {result.out}: {list_top_level(result.files)}"
    if result.shard is not None:
        yield _describe_next(result.shard.index, result.shard.count)
    report = result.to_json()
    yield from describe_serving_briefly(report, explained=request.formats or ())
    yield f"more: {'; '.join(_suggest_further(result))}"


def _describe_next(index: int, count: int) -> str:
    """Describe the next step after a shard."""
    return (
        f"shard {index} of {count} has no scales. When all {count} shards exist: "
        "fp8calib merge SHARDS... --out stats.safetensors, then fp8calib export stats.safetensors"
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
