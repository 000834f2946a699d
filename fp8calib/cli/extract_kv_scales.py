"""Print what `fp8calib extract-kv-scales` wrote."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.cli.console import (
    ConsoleReporter,
    list_top_level,
    print_json,
    print_text,
    prints_json,
)
from fp8calib.cli.serving import describe_serving
from fp8calib.cli.setup import quiet_libraries
from fp8calib.commands.extract_kv_scales import run
from fp8calib.requests.extract_kv_scales import ExtractRequest
from fp8calib.results.extract_kv_scales import ExtractResult


def run_extract_kv_scales(request: ExtractRequest) -> None:
    """Write the scales, and print where they are and who serves them."""
    quiet_libraries()
    result = run(request, ConsoleReporter())
    if prints_json():
        print_json(result.model_dump(mode="json", exclude_none=True))
        return
    for text in _describe(result):
        print_text(text)


def _describe(result: ExtractResult) -> Iterator[str]:
    sizes = result.kv_bytes_per_token
    yield f"{result.dialect} scales of {len(result.layers)} layers, {result.fp8_dtype}"
    yield f"KV cache: {sizes.before:,} bytes per token now, {sizes.after:,} with FP8"
    yield f"written to {result.save_path}: {list_top_level(result.files)}"
    yield from describe_serving(result.model_dump(mode="json"), result.format)
