"""The files that `export` wrote, and what engines do with them."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.errors import format_count
from fp8calib.render.written import describe_checks, list_top_level
from fp8calib.requests.export import ExportRequest
from fp8calib.results.export import ExportResult


def describe(result: ExportResult, request: ExportRequest) -> Iterator[Block]:  # noqa: ARG001
    """Describe where the files are, and what engines do with them."""
    if result.shards:
        yield Line(f"joined {format_count(len(result.shards), 'shard')}")
    yield Line(f"written to {result.out}: {list_top_level(result.files)}")
    if result.compared:
        yield Line(f"compared with the calibrated model: {result.compared}")
    yield from map(Line, describe_checks(result.checked))
