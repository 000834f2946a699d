"""The KV scales that `extract-kv-scales` wrote, and who serves them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.requests.extract_kv_scales import ExtractRequest
from fp8calib.results.extract_kv_scales import ExtractResult
from fp8calib.results.written import describe_checks, list_top_level


def describe(result: ExtractResult, request: ExtractRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe the scales, where they are, and who serves them."""
    yield from map(Line, _describe(result))


def _describe(result: ExtractResult) -> Iterator[str]:
    sizes = result.kv_bytes_per_token
    yield f"{result.dialect} scales of {len(result.layers)} layers, {result.fp8_dtype}"
    yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8"
    if result.compared:
        yield f"compared with the calibrated model: {result.compared}"
    yield f"written to {result.save_path}: {list_top_level(result.files)}"
    yield from describe_checks(result.checked)
