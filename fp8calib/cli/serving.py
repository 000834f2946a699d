"""Print serving commands and limitations at the end of every command that writes scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def describe_serving(report: Mapping[str, Any], format_name: str = "") -> Iterator[str]:
    """Give the lines for the `serving`, `limitations` and `other_engines` of a report.

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
    yield from _describe_others(report, format_name)


def _describe_others(report: Mapping[str, Any], format_name: str) -> Iterator[str]:
    """Say in one line for each format which further engines serve it."""
    groups: dict[str, tuple[list[str], list[str]]] = {}
    for item in report["other_engines"]:
        groups.setdefault(item.get("format", format_name), ([], []))[not item["command"]].append(
            item["name"]
        )
    for name, (able, unable) in groups.items():
        what = f"{name}, other engines" if name else "other engines"
        yes, no = (", ".join(names) or "none" for names in (able, unable))
        yield f"  {what}: served by {yes}; not by {no} (check --engine NAME says why)"
