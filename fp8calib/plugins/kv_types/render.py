"""The types of a KV cache as text."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.plugins.kv_types.request import KvTypesRequest
from fp8calib.plugins.kv_types.result import KvTypesResult
from fp8calib.text import Answer, Block, Line


def describe(result: KvTypesResult, _: KvTypesRequest) -> Iterator[Block]:
    """Give the table and the recommendation."""
    yield result.make_table()
    yield Line()
    yield Answer("\n".join(filter(None, (result.why, result.next and f"next: {result.next}"))))
