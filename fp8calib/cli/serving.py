"""Print serving commands and limitations at the end of every command that writes scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def describe_serving(report: Mapping[str, Any], format_name: str = "") -> Iterator[str]:
    """Give the lines for the `serving` and `limitations` of a report.

    `format_name` is the format of items that do not name their own.
    """
    for item in report["serving"]:
        name = item.get("format", format_name)
        where = f" ({name})" if name else ""
        yield f"serve with {item['engine']}{where}:\n    {item['command']}"
    for item in report["limitations"]:
        name = item.get("format", format_name)
        what = f"{name}, {item['engine']}" if name else item["engine"]
        verdict = "cannot use it" if item["is_blocking"] else "note"
        yield f"  {what}: {verdict}: {item['why']}"
