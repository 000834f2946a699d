"""The plan of a run: hold the whole model in memory, or stream it layer by layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.machine.units import format_duration, format_gib
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.planning.footprint import (
    SLACK_BYTES,
    Footprint,
    Workload,
    batch_bytes,
    change_bytes,
    loading_bytes,
    weights_bytes,
)
from fp8calib.run.planning.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is computed from: a model without weights, and its workload."""

    model: LoadedModel
    geometry: ModelGeometry
    checkpoint: Checkpoint
    weights: WeightSource
    work: Workload
    itemsize: int
    """Bytes per number of the dtype the model computes in."""
    extra: Mapping[str, int]
    """Bytes a run needs besides, whole or streamed (for example statistics), by name."""
    logits_bytes: int = 0
    """Bytes for logits, computed when no layer is in use; 0 where no logits are computed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How a model will be run, and the resources it needs."""

    streams: bool
    why: str
    num_layers: int
    read_bytes: int
    peak: Footprint
    """Anonymous memory, hidden states included."""
    limit_bytes: int
    device_peak: Footprint | None = None
    hidden_ram_bytes: int = 0
    scratch: Path
    scratch_bytes: int = 0
    expected_s: float | None = None

    def as_json(self) -> dict[str, object]:
        """Give the plan as in `--json` and report.json."""
        return {
            "streamed": self.streams,
            "why": self.why,
            "layers": self.num_layers,
            "read_bytes": self.read_bytes,
            "peak_bytes": self.peak.total_bytes,
            "peak_parts": dict(self.peak.parts),
            "memory_limit_bytes": self.limit_bytes,
            "device_peak_bytes": None if self.device_peak is None else self.device_peak.total_bytes,
            "scratch_bytes": self.scratch_bytes,
            "scratch_folder": str(self.scratch) if self.scratch_bytes else None,
            "expected_s": self.expected_s,
        }

    def describe(self) -> Iterator[str]:
        """Describe in a few lines how the model will be run."""
        yield self.why
        if not self.streams:
            return
        parts = ", ".join(f"{name} {format_gib(size)}" for name, size in self.peak.parts.items())
        yield (
            f"plan: {self.num_layers} layers, {format_gib(self.read_bytes)} to read, peak memory "
            f"{format_gib(self.peak.total_bytes)} ({parts})"
        )
        scratch = f"{format_gib(self.scratch_bytes)} of hidden states in {self.scratch}"
        time = "" if self.expected_s is None else f", about {format_duration(self.expected_s)}"
        yield f"plan: scratch disk {scratch if self.scratch_bytes else 'none'}{time}"


def plan_whole(subject: PlanInputs, limits: Limits, scratch: Path) -> RunPlan | None:
    """Plan to hold the whole model in memory; None where it does not fit."""
    needs = whole_parts(subject)
    own = {"process": limits.process_bytes + SLACK_BYTES}
    if limits.device_bytes is None:
        peak, device_peak = Footprint(parts={**own, **needs}), None
        needed, limit, where = peak.total_bytes, limits.host_bytes, limits.host_why
    else:
        peak, device_peak = Footprint(parts=own), Footprint(parts=needs)
        needed, limit, where = device_peak.total_bytes, limits.device_bytes, "free on the GPU"
    if needed > limit:
        return None
    there = f"{format_gib(limit)} are {where}"
    return RunPlan(
        streams=False,
        why=f"the model is held whole: it needs {format_gib(needed)}, {there}",
        num_layers=len(subject.geometry.layers),
        read_bytes=subject.checkpoint.total_size_bytes,
        peak=peak,
        limit_bytes=limits.host_bytes,
        device_peak=device_peak,
        scratch=scratch,
    )


def whole_parts(subject: PlanInputs) -> dict[str, int]:
    """Compute the bytes of a run with the whole model in memory, without the process itself."""
    inside = working_parts(subject, head=True)
    loading = loading_bytes(subject.geometry, subject.weights, subject.itemsize)
    # Loading ends before the first batch: only what it needs beyond the batches counts.
    above = max(loading - sum(inside.values()), 0)
    weights = weights_bytes(subject.model, subject.itemsize)
    return {"weights": weights, **inside, **({"loading": above} if above else {})}


def working_parts(subject: PlanInputs, *, head: bool) -> dict[str, int]:
    """Compute the bytes of a run besides weights and hidden states."""
    work = subject.work
    parts = {
        "micro-batch": batch_bytes(subject.model, subject.geometry, work, subject.itemsize),
        **subject.extra,
    }
    if work.changes_weights:
        parts["changed weights"] = change_bytes(subject.geometry)
    if head and subject.logits_bytes:
        parts["logits"] = subject.logits_bytes
    return parts
