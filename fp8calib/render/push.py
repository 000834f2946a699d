"""What is or would be uploaded to the Hub, as lines."""

from __future__ import annotations

from collections.abc import Iterator

from fp8calib.blocks import Block, Line
from fp8calib.checkpoint.disk import format_size
from fp8calib.results.push import PushResult


def describe_push(push: PushResult) -> Iterator[Block]:
    """Name the commit, or list the files and say how to upload them."""
    if push.commit:
        yield Line(f"uploaded to {push.repo}: {push.commit}")
        return
    size = format_size(sum(each.size_bytes for each in push.files))
    yield Line(f"nothing is uploaded; --upload would send {len(push.files)} files ({size}):")
    yield from (Line(f"    {format_size(each.size_bytes):>10}  {each.name}") for each in push.files)
