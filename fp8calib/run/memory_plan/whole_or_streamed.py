"""Decide before a run whether a model is held whole in memory or streamed layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fp8calib.errors import UsageError
from fp8calib.model.load import ModelSource, build_skeleton
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.memory_plan.limits import Limits
from fp8calib.run.memory_plan.plan import MemoryPlan, PlanInputs, plan_whole
from fp8calib.run.memory_plan.stream_plan import StreamPlanner
from fp8calib.run.streaming.model import Streaming
from fp8calib.run.streaming.probe import Probe

ProbeModel = Callable[[PreparedModel, Streaming], Probe | None]
"""Measures the first layer of a model that is streamed; None where nothing runs through it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryMode:
    """How a model is held in memory while it runs."""

    plan: MemoryPlan | None
    """None where nothing is planned: the model is in memory, or something else places it."""
    prepared: PreparedModel
    """The model, without weights unless it is in memory; a streamed one has the dtype that it
    computes in."""
    streaming: Streaming | None = None
    """None: the model is loaded whole."""

    def as_json(self) -> Mapping[str, Any]:
        """Give the mode as it appears in the JSON output and in report.json."""
        return {"streamed": False} if self.plan is None else self.plan.as_json()

    def describe(self) -> Iterator[str]:
        """Describe the mode in a few lines."""
        if self.plan is not None:
            yield from self.plan.describe()


def choose_memory_mode(
    subject: PlanInputs,
    limits: Limits,
    *,
    source: ModelSource,
    scratch: Path,
    probe: ProbeModel,
    cannot_stream: UsageError | None = None,
    total_bytes: int = 0,
    walks: int = 1,
    always_streams: str = "",
) -> MemoryMode:
    """Hold the model whole where it fits, else plan to stream it.

    `probe` is called only for a model that is streamed. Hidden states that do not fit into memory
    are written to `scratch`. At least `total_bytes` are read, and the layers `walks` times.
    `always_streams` is the reason why the model is streamed even if it fits.

    Raises:
        UsageError: the model fits neither whole nor streamed; or it does not fit whole, and
            `cannot_stream` is given.
    """
    whole = None if always_streams else plan_whole(subject, limits, scratch)
    if whole is not None:
        return MemoryMode(plan=whole, prepared=subject.prepared)
    if cannot_stream is not None:
        raise cannot_stream
    model = build_skeleton(source, dtype=subject.dtype)
    prepared = replace(subject.prepared, weights=WeightSource(model, subject.checkpoint))
    planner = StreamPlanner(replace(subject, prepared=prepared), limits, scratch)

    def stream(plan: MemoryPlan) -> Streaming:
        return Streaming(
            dtype=subject.dtype,
            device=subject.device,
            hidden_ram_bytes=plan.hidden_ram_bytes,
            scratch=plan.scratch,
        )

    measured = probe(prepared, stream(planner.plan()))
    plan = planner.plan(measured, total_bytes=total_bytes, walks=walks)
    if always_streams:
        plan = replace(plan, why=always_streams)
    return MemoryMode(plan=plan, prepared=prepared, streaming=stream(plan))
