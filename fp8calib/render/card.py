"""Where a model card is, and how to publish it."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.render.push import describe_push
from fp8calib.requests.card import CardRequest
from fp8calib.results.card import CardResult


def describe(result: CardResult, request: CardRequest) -> Iterator[Block]:  # noqa: ARG001
    """Name the file, and the command that uploads it."""
    yield Line(f"written to {result.path}")
    for path in result.entries:
        yield Line(f"written to {path}")
    if result.push is None:
        yield Line(f"publish it with:\n    {result.upload}")
    else:
        yield from describe_push(result.push)
