"""The choice between a model in memory whole and one that is streamed, and what it will cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.machine.units import spell_duration, spell_size
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
class Streamable:
    """A model without weights, and what will run through it."""

    model: LoadedModel
    geometry: ModelGeometry
    checkpoint: Checkpoint
    weights: WeightSource
    work: Workload
    itemsize: int
    """Bytes of a number as the model computes."""
    extra: Mapping[str, int]
    """What a run needs besides, whole or streamed: statistics, say."""
    logits_bytes: int = 0
    """What is needed for logits, when no layer is in use; 0 where nobody needs them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """How a model will be run, and what that takes."""

    streams: bool
    why: str
    num_layers: int
    read_bytes: int
    peak: Footprint
    """Of anonymous memory, hidden states in it included."""
    limit_bytes: int
    device_peak: Footprint | None = None
    hidden_ram_bytes: int = 0
    scratch: Path
    scratch_bytes: int = 0
    expected_s: float | None = None

    def as_json(self) -> dict[str, object]:
        """Give what `--json` and report.json say of it."""
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


def plan_whole(subject: Streamable, limits: Limits, scratch: Path) -> RunPlan | None:
    """Plan to hold the whole model in memory; None where it does not fit."""
    needs = list_whole(subject)
    own = {"process": limits.process_bytes + SLACK_BYTES}
    if limits.device_bytes is None:
        peak, device_peak = Footprint(parts={**own, **needs}), None
        needed, limit, where = peak.total_bytes, limits.host_bytes, limits.host_why
    else:
        peak, device_peak = Footprint(parts=own), Footprint(parts=needs)
        needed, limit, where = device_peak.total_bytes, limits.device_bytes, "free on the GPU"
    if needed > limit:
        return None
    there = f"{spell_size(limit)} are {where}"
    return RunPlan(
        streams=False,
        why=f"the model is held whole: it needs {spell_size(needed)}, {there}",
        num_layers=len(subject.geometry.layers),
        read_bytes=subject.checkpoint.total_size_bytes,
        peak=peak,
        limit_bytes=limits.host_bytes,
        device_peak=device_peak,
        scratch=scratch,
    )


def list_whole(subject: Streamable) -> dict[str, int]:
    """Compute what a model takes that is held whole, without the process itself."""
    inside = list_inside(subject, head=True)
    loading = loading_bytes(subject.geometry, subject.weights, subject.itemsize)
    # It is over before anything runs: only what it takes above that counts.
    above = max(loading - sum(inside.values()), 0)
    weights = weights_bytes(subject.model, subject.itemsize)
    return {"weights": weights, **inside, **({"loading": above} if above else {})}


def list_inside(subject: Streamable, *, head: bool) -> dict[str, int]:
    """Compute what a run takes besides weights and hidden states."""
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


def describe_run(plan: RunPlan) -> Iterator[str]:
    """Say in a few lines how a model will be run."""
    yield plan.why
    if not plan.streams:
        return
    parts = ", ".join(f"{name} {spell_size(size)}" for name, size in plan.peak.parts.items())
    yield (
        f"plan: {plan.num_layers} layers, {spell_size(plan.read_bytes)} to read, peak memory "
        f"{spell_size(plan.peak.total_bytes)} ({parts})"
    )
    waits = f"{spell_size(plan.scratch_bytes)} of hidden states in {plan.scratch}"
    time = "" if plan.expected_s is None else f", about {spell_duration(plan.expected_s)}"
    yield f"plan: scratch disk {waits if plan.scratch_bytes else 'none'}{time}"
