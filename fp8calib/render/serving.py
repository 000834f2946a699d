"""Which engines serve a checkpoint, in lines."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from fp8calib.engines.serving import UNKNOWN


def describe_serving(report: Mapping[str, Any], format_name: str = "") -> Iterator[str]:
    """Give the lines for the `serving`, `limitations` and `other_engines` of a report.

    Limits of an engine that can use a file are not in them: `check` prints those.

    `format_name` is the format of items that do not name their own.
    """
    for item in report["serving"]:
        name = item.get("format", format_name)
        where = f" ({name})" if name else ""
        yield f"serve with {item['engine']}{where}:\n    {item['command']}"
    found = [(item.get("format", format_name), item) for item in report["limitations"]]
    blocked = {(name, item["engine"]) for name, item in found if item["is_blocking"]}
    noted: dict[str, list[str]] = {}
    for name, item in found:
        if item["is_blocking"]:
            yield _explain(name, item)
        elif (name, item["engine"]) not in blocked:
            noted.setdefault(name, []).append(item["engine"])
    yield from _join(noted, "limits in", "names them")
    yield from _describe_others(report, format_name)


def describe_serving_briefly(
    report: Mapping[str, Any], *, explained: Collection[str]
) -> Iterator[str]:
    """Give the commands that serve each format; of those in `explained`, why an engine cannot."""
    commands: dict[str, list[Mapping[str, Any]]] = {}
    for item in report["serving"]:
        commands.setdefault(item["format"], []).append(item)
    for name, items in commands.items():
        engines = dict.fromkeys(item["engine"] for item in items)
        lines = "".join(f"\n    {item['command']}" for item in items)
        yield f"serve {name} with {', '.join(engines)}:{lines}"
    unable: dict[str, list[str]] = {}
    doubtful: dict[str, list[str]] = {}
    for item in report["limitations"]:
        if item["why"].startswith(UNKNOWN):
            doubtful.setdefault(item["format"], []).append(item["engine"])
        elif item["is_blocking"] and item["format"] in explained:
            yield _explain(item["format"], item)
        elif item["is_blocking"]:
            unable.setdefault(item["format"], []).append(item["engine"])
    yield from _join(unable, "cannot be used by", "says why")
    yield from _join(doubtful, "cannot be judged for", "says why")


def _explain(name: str, item: Mapping[str, Any]) -> str:
    what = f"{name}, {item['engine']}" if name else item["engine"]
    return f"  {what}: cannot use it: {item['why']}"


def _join(engines: Mapping[str, list[str]], text: str, check: str) -> Iterator[str]:
    for name, found in engines.items():
        listed = ", ".join(dict.fromkeys(found))
        yield f"  {f'{name}: ' if name else ''}{text} {listed} (`fp8calib check` {check})"


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


def list_top_level(files: Sequence[str]) -> str:
    """List files and folders, each folder once: `kv-overlay/, stats.safetensors`."""
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    return ", ".join(dict.fromkeys(names))
