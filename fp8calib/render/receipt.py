"""What an action on a receipt did or found, as lines."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.requests.receipt import ReceiptRequest
from fp8calib.results.receipt import ReceiptResult


def describe(result: ReceiptResult, request: ReceiptRequest) -> Iterator[Block]:
    """Give the answer, what agrees, what was not compared, and what disagrees."""
    if result.action == "verify":
        answer = "agrees" if result.passed else "does not agree"
        yield Line(f"{request.file}: {answer}")
    for text in result.checked:
        yield Line(f"  ok: {text}")
    for text in result.unchecked:
        yield Line(f"  not checked: {text}")
    for text in result.faults:
        yield Line(f"  fault: {text}")
    if result.written:
        yield Line(f"written to {result.written}")
    if result.markdown:
        yield Line(result.markdown)
