"""The plan of a run of any command as a table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fp8calib.blocks import Block, Line, Table
from fp8calib.machine.units import format_gib
from fp8calib.results.record import LayerScheme, ShardIndex
from fp8calib.results.run_plan import RunPlan

_TITLES = {
    "weights_size_bytes": "weights",
    "out": "output",
    "streamed": "layer by layer",
    "why": "because",
    "read_bytes": "to read",
    "peak_bytes": "peak memory",
    "peak_parts": "of which",
    "memory_limit_bytes": "memory limit",
    "device_peak_bytes": "peak memory of the GPU",
    "scratch_bytes": "scratch disk",
}
"""Titles of rows whose JSON key is not plain English."""
_BESIDE = {"dtype_why": "dtype", "scratch_folder": "scratch_bytes"}
"""Keys that are shown in parentheses in the row of another key."""


def describe(result: RunPlan, request: object) -> Iterator[Block]:  # noqa: ARG001
    """Give the plan as a table, and the rows of the text below it.

    Keys without a value are left out of the table.
    """
    rows = list(_list_rows(result.plan))
    yield Table(title=result.overview().title, columns=["what", "value"], rows=rows)
    yield from map(Line, result.text)


def _list_rows(plan: Mapping[str, Any]) -> Iterator[list[str]]:
    beside = {row: plan[key] for key, row in _BESIDE.items() if plan.get(key)}
    for key, value in plan.items():
        if key in _BESIDE or key == "rows" or value is None or value == []:
            continue
        text = _format_value(key, value)
        yield [_TITLES.get(key, key), f"{text} ({beside[key]})" if key in beside else text]


def _format_value(key: str, value: object) -> str:
    if isinstance(value, ShardIndex):
        return f"{value.index} of {value.count}"
    if isinstance(value, LayerScheme):
        return f"{value.pattern}={value.scheme} ({value.linears} linears)"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_gib(size)}" for name, size in value.items())
    if isinstance(value, list):
        return ", ".join(_format_value("", each) for each in value)
    return _format_number(key, value)


def _format_number(key: str, value: object) -> str:
    if key.endswith("_bytes") and isinstance(value, int):
        return format_gib(value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
