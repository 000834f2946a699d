"""Which engines serve a checkpoint, in lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any


def describe_serving(
    report: Mapping[str, Any], format_name: str = "", *, explained: Collection[str] | None = None
) -> Iterator[str]:
    """Give the lines for the `serving`, `limitations` and `other_engines` of a report.

    Why an engine cannot use a file is in the lines only for the formats in `explained`; None
    explains all. Conditions under which it can are not in them: `check` prints those.

    `format_name` is the format of items that do not name their own.
    """
    for item in report["serving"]:
        name = item.get("format", format_name)
        where = f" ({name})" if name else ""
        yield f"serve with {item['engine']}{where}:\n    {item['command']}"
    unable: dict[str, list[str]] = {}
    noted: dict[str, list[str]] = {}
    for item in report["limitations"]:
        name = item.get("format", format_name)
        what = f"{name}, {item['engine']}" if name else item["engine"]
        if not item["is_blocking"]:
            noted.setdefault(name, []).append(item["engine"])
        elif explained is None or name in explained:
            yield f"  {what}: cannot use it: {item['why']}"
        else:
            unable.setdefault(name, []).append(item["engine"])
    for names, text in ((unable, "cannot be used by"), (noted, "conditions for")):
        for name, engines in names.items():
            listed = ", ".join(dict.fromkeys(engines))
            yield f"  {f'{name}: ' if name else ''}{text} {listed} (`fp8calib check` says why)"
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
        yield f"  {what}: served by {yes}; not by {no} (`check --engine NAME` says why)"
