"""What commands give: the base of all results, what several have in common, plans and errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field

from fp8calib.checkpoint.output import format_size
from fp8calib.commands import SCHEMA_VERSION
from fp8calib.errors import cut_list
from fp8calib.model.geometry import Frozen, ModelGeometry
from fp8calib.text import Block, Line, Table, describe_peak, format_gib


class Result(Frozen):
    """What a command gives: `--json` prints it, and the function of Python returns it."""

    @property
    def answer(self) -> str:
        """The result in a sentence; empty if the command only writes files."""
        return ""

    def __repr__(self) -> str:
        known = ((key, value) for key, value in self if value not in ("", None, False))
        plain = [
            f"{key}={value:.5g}" if isinstance(value, float) else f"{key}={value}"
            for key, value in known
            if isinstance(value, str | int | float | Path)
        ]
        shown = [repr(self.answer)] if self.answer else []
        return f"{type(self).__name__}({cut_list([*shown, *plain], 20)})"

    __str__ = __repr__

    @property
    def passed(self) -> bool:
        """Whether no check and no gate failed."""
        return self.exit_code == 0

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        return 0

    def to_json(self) -> dict[str, Any]:
        """Make the object that `--json` prints."""
        found = self.model_dump(mode="json", by_alias=True)
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **found}

    @classmethod
    def from_json(cls, document: Mapping[str, object]) -> Self:
        """Read an object that `to_json` made.

        Raises:
            ValidationError: it is no such object.
        """
        computed = {*cls.model_computed_fields, "schema_version", "passed"}
        return cls.model_validate({k: v for k, v in document.items() if k not in computed})


class RunPlan(Result):
    """What `--dry-run --json` prints: the run that is not started."""

    plan: dict[str, Any]
    text: tuple[str, ...] = Field(default=(), exclude=True)
    """Describes the rows of the text."""

    def describe(self) -> Iterator[Block]:
        """Say how the run uses memory, then give the plan as a table, and the rows of the text.

        Keys without a value are left out of the table.
        """
        yield from map(Line, _describe_memory(self.plan))
        title = "plan (nothing was run or written)"
        yield Table(title=title, columns=["what", "value"], rows=list(_list_rows(self.plan)))
        yield from map(Line, self.text)


_TITLES = {
    "weights_size_bytes": "weights",
    "out": "output",
    "memory_limit_bytes": "memory limit",
    "device_peak_bytes": "peak memory of the GPU",
    "scratch_bytes": "hidden states on disk",
}
"""Titles of rows whose JSON key is not plain English."""
_BESIDE = {"dtype_why": "dtype", "scratch_folder": "scratch_bytes"}
"""Keys that are shown in parentheses in the row of another key."""
_IN_WORDS = frozenset(("streamed", "why", "read_bytes", "peak_bytes", "peak_parts", "rows"))
"""Keys that lines describe, not rows of the table."""


def _describe_memory(plan: Mapping[str, Any]) -> Iterator[str]:
    if not plan.get("peak_bytes"):
        return
    yield f"{plan.get('why') or 'the whole model is in memory'}."
    holds = "holds two layers at a time, " if plan.get("streamed") else ""
    read, peak = format_gib(plan.get("read_bytes") or 0), describe_peak(plan["peak_parts"])
    yield f"it {holds}reads {read} of weights, and needs {peak}."


def _list_rows(plan: Mapping[str, Any]) -> Iterator[list[str]]:
    beside = {row: plan[key] for key, row in _BESIDE.items() if plan.get(key)}
    for key, value in plan.items():
        if key in _BESIDE or key in _IN_WORDS or value is None or value == []:
            continue
        text = _format(key, value)
        yield [_TITLES.get(key, key), f"{text} ({beside[key]})" if key in beside else text]


def _format(key: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {format_gib(size)}" for name, size in value.items())
    if key.endswith("_bytes") and isinstance(value, int):
        return format_gib(value) if value else "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Failure(Frozen):
    """What failed and where, and what to do."""

    kind: Literal[
        "usage", "recipe", "model", "data", "calibration", "export", "verification", "server", "bug"
    ]
    message: str
    hint: str


class ErrorResult(Result):
    """The error of a command."""

    error: Failure

    @property
    def passed(self) -> bool:
        """Nothing passed."""
        return False


# --- what is written -----------------------------------------------------------------------------


_WIDE_DTYPES = {"float32": 4, "float64": 8}


class BeforeAfter(Frozen):
    """Sizes in bytes: before and after a command, or without and with FP8."""

    before: int
    after: int

    def describe(self) -> str:
        """Describe both sizes: `269 MB -> 135 MB`."""
        return f"{format_size(self.before)} -> {format_size(self.after)}"


def measure_kv_bytes(geometry: ModelGeometry) -> BeforeAfter:
    """Give the bytes of KV cache per token over all layers and ranks, now and in FP8."""
    elements = geometry.kv_elements_per_token
    width = _WIDE_DTYPES.get(geometry.checkpoint_dtype, 2)
    return BeforeAfter(before=elements * width, after=elements)


class WrittenCheck(Frozen):
    """What an engine will do with a written checkpoint."""

    path: str
    """Path of the checkpoint, relative to the output folder; `.` for the folder itself."""
    engine: str
    """Name and release of the engine."""
    verdict: str
    """`ok`, `not ok` or `unknown`."""
    summary: str
    """The verdict with the layers that are served, or with the reason."""
    command: str
    """The command that serves it; empty if it is not ok."""


def describe_checks(checks: Sequence[WrittenCheck]) -> Iterator[str]:
    """Give a line for each checkpoint and engine, with the command that serves it."""
    for each in checks:
        where = "" if each.path == "." else f"{each.path}, "
        command = f":\n    {each.command}" if each.command else ""
        yield f"{where}{each.engine}: {each.summary}{command}"


def list_top_level(files: Sequence[str]) -> str:
    """List files and folders, each folder once: `kv-overlay/, stats.safetensors`."""
    names = (f"{name.split('/')[0]}/" if "/" in name else name for name in files)
    return ", ".join(dict.fromkeys(names))


def list_checkpoint(files: Sequence[str]) -> str:
    """List the files of a checkpoint, several shards as one entry."""
    shards = [name for name in files if name.endswith(".safetensors")]
    if len(shards) <= 1:
        return list_top_level(files)
    return list_top_level([f"{len(shards)} shards", *(n for n in files if n not in shards)])
