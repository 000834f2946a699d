"""The plan of a run that `--dry-run` does not start."""

from __future__ import annotations

from typing import NotRequired

from pydantic import Field, SkipValidation
from typing_extensions import TypedDict

from fp8calib.overview import Overview
from fp8calib.results.record import LayerScheme, Result, ShardIndex


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
    """The rows of a text that were used; `examples` are the first ones, as the model sees them."""

    read: int
    used: int
    too_short: int
    rejected: NotRequired[int]
    """Conversations that the chat template rejects; releases before 0.3 do not give it."""
    cut: int
    conversations: int
    chat_template: str | None
    """sha256 (hex) of the template that was applied."""
    examples: list[str]


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
