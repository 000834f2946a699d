"""The plan of a run that `--dry-run` does not start."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NotRequired

from pydantic import Field, SkipValidation
from typing_extensions import TypedDict

from fp8calib.commands.result import LayerScheme, Overview, Result, ShardIndex
from fp8calib.text import Block, Line, Table, format_gib


class ResourcePlan(TypedDict):
    """How a run uses memory; only `streamed` is known where no plan was needed."""

    streamed: bool
    why: NotRequired[str]
    layers: NotRequired[int]
    read_bytes: NotRequired[int]
    peak_bytes: NotRequired[int]
    peak_parts: NotRequired[dict[str, int]]
    memory_limit_bytes: NotRequired[int]
    device_peak_bytes: NotRequired[int | None]
    scratch_bytes: NotRequired[int]
    scratch_folder: NotRequired[str | None]


class MeasuredMemory(ResourcePlan):
    """The plan, and the peak that was measured."""

    peak_measured_bytes: int | None


class TextRows(TypedDict):
    """The rows of a text that were used."""

    read: int
    used: int
    too_short: int
    rejected: NotRequired[int]
    """Conversations that the chat template rejects; releases before 0.3 do not give it."""
    cut: int
    conversations: int
    chat_template: str | None
    """sha256 (hex) of the template that was applied."""


class Plan(ResourcePlan):
    """A planned run."""

    model: str
    architecture: NotRequired[str]
    weights_size_bytes: int
    dtype: str
    dtype_why: str
    device: str
    sequences: int
    tokens: int
    shard: NotRequired[ShardIndex]
    data: list[str]
    rows: NotRequired[TextRows | None]
    out: NotRequired[str]
    writes: NotRequired[list[str]]
    engine: NotRequired[str]
    candidates: NotRequired[list[str]]
    scheme: NotRequired[str]
    layer_schemes: NotRequired[list[LayerScheme]]
    rounding: NotRequired[str]
    linears: NotRequired[int]
    output_size_bytes: NotRequired[int]
    work_disk_bytes: NotRequired[int]
    budget: NotRequired[str]
    steps: NotRequired[list[str]]


class RunPlan(Result):
    """What `--dry-run --json` prints."""

    plan: SkipValidation[Plan]
    text: tuple[str, ...] = Field(default=(), exclude=True)
    """Describes the rows of the text."""

    def overview(self) -> Overview:
        """Summarize the plan."""
        rows = [[key, str(value)] for key, value in self.plan.items() if key != "rows"]
        return Overview(title="plan (nothing was run or written)", rows=rows, columns=("what", ""))


_TITLES = {
    "weights_size_bytes": "weights",
    "out": "output",
    "memory_limit_bytes": "memory limit",
    "device_peak_bytes": "peak memory of the GPU",
    "scratch_bytes": "scratch disk",
}
"""Titles of rows whose JSON key is not plain English."""
_BESIDE = {"dtype_why": "dtype", "scratch_folder": "scratch_bytes"}
"""Keys that are shown in parentheses in the row of another key."""


def describe(result: RunPlan, request: object) -> Iterator[Block]:  # noqa: ARG001
    """Say how the run uses memory, and give the rest of the plan as a table, then rows of the text.

    Keys without a value are left out of the table.
    """
    yield from map(Line, _describe_memory(result.plan))
    rows = list(_list_rows(result.plan))
    yield Table(title=result.overview().title, columns=["what", "value"], rows=rows)
    yield from map(Line, result.text)


_IN_WORDS = frozenset(("streamed", "why", "read_bytes", "peak_bytes", "peak_parts", "rows"))
"""Keys that are no rows of the table."""


def _describe_memory(plan: Mapping[str, Any]) -> Iterator[str]:
    if not plan.get("peak_bytes"):
        return
    yield f"{plan.get('why') or 'the model is held whole'}."
    parts = plan.get("peak_parts") or {}
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    named = ", ".join(f"{name} {format_gib(parts[name])}" for name in largest)
    read = format_gib(plan.get("read_bytes") or 0)
    yield f"it reads {read} of weights, and needs {format_gib(plan['peak_bytes'])}: mostly {named}."


def _list_rows(plan: Mapping[str, Any]) -> Iterator[list[str]]:
    beside = {row: plan[key] for key, row in _BESIDE.items() if plan.get(key)}
    for key, value in plan.items():
        if key in _BESIDE or key in _IN_WORDS or value is None or value == []:
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
