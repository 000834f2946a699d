"""What a run needs of memory, and whether the whole model fits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.machine.units import format_gib
from fp8calib.model.prepared import PreparedModel
from fp8calib.run.memory_plan.footprint import (
    SLACK_BYTES,
    Workload,
    batch_bytes,
    change_bytes,
    loading_bytes,
    weights_bytes,
)
from fp8calib.run.memory_plan.limits import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanInputs:
    """What a plan is computed from: a model without weights, and its workload."""

    prepared: PreparedModel
    checkpoint: Checkpoint
    work: Workload
    dtype: torch.dtype
    """The one that the model computes in."""
    device: str
    extra: Mapping[str, int]
    """Further bytes of a run, whole or streamed, by what needs them (for example statistics)."""
    logits_bytes: int = 0
    """Bytes for logits, computed when no layer is in use; 0 where no logits are computed."""

    @property
    def itemsize(self) -> int:
        """Bytes per number."""
        return self.dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """How a model will be run, and the resources it needs."""

    streams: bool
    why: str
    num_layers: int
    read_bytes: int
    peak: Mapping[str, int]
    """Bytes of anonymous memory by purpose, hidden states included."""
    limit_bytes: int
    device_peak: Mapping[str, int] | None = None
    hidden_ram_bytes: int = 0
    scratch: Path
    scratch_bytes: int = 0

    def as_json(self) -> dict[str, object]:
        """Give the plan as in `--json` and report.json."""
        return {
            "streamed": self.streams,
            "why": self.why,
            "layers": self.num_layers,
            "read_bytes": self.read_bytes,
            "peak_bytes": sum(self.peak.values()),
            "peak_parts": dict(self.peak),
            "memory_limit_bytes": self.limit_bytes,
            "device_peak_bytes": sum(self.device_peak.values()) if self.device_peak else None,
            "scratch_bytes": self.scratch_bytes,
            "scratch_folder": str(self.scratch) if self.scratch_bytes else None,
        }

    def describe(self) -> Iterator[str]:
        """Describe in a few lines how the model will be run."""
        yield self.why
        if not self.streams:
            return
        yield (
            f"plan: {self.num_layers} layers, {format_gib(self.read_bytes)} to read, peak memory "
            f"{describe_peak(self.peak)}"
        )
        if self.device_peak:
            yield f"plan: on the GPU {describe_peak(self.device_peak)}"
        scratch = f"{format_gib(self.scratch_bytes)} of hidden states in {self.scratch}"
        yield f"plan: scratch disk {scratch if self.scratch_bytes else 'none'}"


def describe_peak(peak: Mapping[str, int]) -> str:
    """Describe memory by purpose, the total first."""
    parts = ", ".join(f"{name} {format_gib(size)}" for name, size in peak.items())
    return f"{format_gib(sum(peak.values()))} ({parts})"


def plan_whole(subject: PlanInputs, limits: Limits, scratch: Path) -> MemoryPlan | None:
    """Plan to hold the whole model in memory; None where it does not fit."""
    fits, numbers = compare_whole(subject, limits)
    if not fits:
        return None
    needs = _whole_parts(subject)
    own = {"process": limits.process_bytes + SLACK_BYTES}
    on_gpu = limits.device_bytes is not None
    return MemoryPlan(
        streams=False,
        why=f"the model is held whole: it needs {numbers}",
        num_layers=len(subject.prepared.geometry.layers),
        read_bytes=subject.checkpoint.total_size_bytes,
        peak=own if on_gpu else {**own, **needs},
        limit_bytes=limits.host_bytes,
        device_peak=needs if on_gpu else None,
        scratch=scratch,
    )


def compare_whole(subject: PlanInputs, limits: Limits) -> tuple[bool, str]:
    """Compare what the whole model needs with the limit: whether it fits, and both in words."""
    needed = sum(_whole_parts(subject).values())
    if limits.device_bytes is None:
        needed += limits.process_bytes + SLACK_BYTES
        limit, where = limits.host_bytes, limits.host_why
    else:
        limit, where = limits.device_bytes, "free on the GPU"
    return needed <= limit, f"{format_gib(needed)}, {format_gib(limit)} are {where}"


def _whole_parts(subject: PlanInputs) -> dict[str, int]:
    """Compute the bytes of a run with the whole model in memory, without the process itself."""
    prepared, inside = subject.prepared, working_parts(subject, head=True)
    loading = loading_bytes(prepared.geometry, prepared.weights, subject.itemsize)
    # Loading ends before the first batch: only what it needs beyond the batches counts.
    above = max(loading - sum(inside.values()), 0)
    weights = weights_bytes(prepared.model, subject.itemsize)
    return {"weights": weights, **inside, **({"loading": above} if above else {})}


def working_parts(subject: PlanInputs, *, head: bool) -> dict[str, int]:
    """Compute the bytes of a run besides weights and hidden states."""
    prepared, work = subject.prepared, subject.work
    parts = {
        "micro-batch": batch_bytes(prepared.model, prepared.geometry, work, subject.itemsize),
        **subject.extra,
    }
    if work.changes_weights:
        parts["changed weights"] = change_bytes(prepared.geometry)
    if head and subject.logits_bytes:
        parts["logits"] = subject.logits_bytes
    return parts
