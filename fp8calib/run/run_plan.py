"""The choice between a model in memory whole and one that is streamed, and what it will cost."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from fp8calib.checkpoint.reader import Checkpoint
from fp8calib.errors import UsageError
from fp8calib.geometry import ModelGeometry
from fp8calib.machine_memory import anonymous_bytes, available_bytes
from fp8calib.model.load import LoadedModel
from fp8calib.model.weights import WeightSource
from fp8calib.run.footprint import (
    SLACK_BYTES,
    Footprint,
    LayerSize,
    Workload,
    batch_bytes,
    change_bytes,
    head_bytes,
    hidden_bytes,
    layer_flops,
    loading_bytes,
    peak_of_layers,
    size_part,
    weights_bytes,
)
from fp8calib.run.probe import Probe, expect_duration
from fp8calib.run.spelling import spell_duration, spell_size
from fp8calib.run.streamed import layer_parts, part_around
from fp8calib.run.streamed_weights import PartedWeights

_GIB = 2**30
_OTHERS_SHARE = 0.1
"""Of what is available, left to others, who may want more while the run lasts."""
_UNKNOWN_PROCESS_BYTES = 2**29
"""What the interpreter and the libraries take where nobody counts."""
_ROUNDED_BYTES = 2**25
"""Two runs of one command differ by less; the smallest cap is named so much larger."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What memory there is."""

    host_bytes: int
    """What the process may hold, its interpreter and libraries included."""
    host_why: str
    """Who says so: `given by --memory`, `available`."""
    is_given: bool
    """Whether a larger --memory would help."""
    process_bytes: int
    """What it holds already."""
    device_bytes: int | None
    """What is free on the GPU; None where the model runs on the CPU."""


def find_limits(device: str, memory_gib: float | None, *, sharers: int = 1) -> Limits:
    """Ask the machine what memory it has left, and hold that against --memory.

    Args:
        device: where the model runs.
        memory_gib: --memory, the cap of each process.
        sharers: how many processes share what the machine has left.

    Raises:
        UsageError: --memory is no amount of memory.
    """
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise UsageError(f"--memory {memory_gib}: a number of GiB above 0 is needed")
    device_bytes = None
    if device != "cpu":
        device_bytes = int(torch.cuda.mem_get_info(device)[0] * (1 - _OTHERS_SHARE))
    process = anonymous_bytes() or _UNKNOWN_PROCESS_BYTES
    found = process + int(available_bytes() * (1 - _OTHERS_SHARE)) // sharers
    given = None if memory_gib is None else int(memory_gib * _GIB)
    is_given = given is not None and given <= found
    return Limits(
        host_bytes=given if given is not None and is_given else found,
        host_why="given by --memory" if is_given else "available",
        is_given=is_given,
        process_bytes=process,
        device_bytes=device_bytes,
    )


def refuse_device_map(memory_gib: float | None) -> None:
    """Refuse --memory beside --device-map.

    Raises:
        UsageError: they contradict each other.
    """
    if memory_gib is not None:
        raise UsageError(
            "--memory streams a model through one device, and --device-map spreads it over all",
            hint="leave one of them out",
        )


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
    weights = {"weights": weights_bytes(subject.model, subject.itemsize)}
    inside = _inside(subject, head=True)
    loading = _loading_bytes(subject) - sum(inside.values())
    if loading > 0:  # loading is over before anything runs: only what it takes above that counts
        inside["loading"] = loading
    own = {"process": limits.process_bytes + SLACK_BYTES}
    if limits.device_bytes is None:
        peak, device_peak = Footprint(parts={**own, **weights, **inside}), None
        needed, limit, where = peak.total_bytes, limits.host_bytes, limits.host_why
    else:
        peak, device_peak = Footprint(parts=own), Footprint(parts={**weights, **inside})
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


class StreamPlanner:
    """Plans to stream a model: first by the formula alone, then by what a probe has measured."""

    def __init__(
        self,
        subject: Streamable,
        limits: Limits,
        layers: list[LayerSize],
        *,
        around_bytes: int,
        scratch: Path,
    ) -> None:
        self._subject = subject
        self._limits = limits
        self._layers = layers
        self._around_bytes = around_bytes
        self._scratch = scratch

    def plan(
        self,
        probe: Probe | None = None,
        *,
        total_bytes: int = 0,
        further_walks: Sequence[float] = (),
    ) -> RunPlan:
        """Plan the run.

        Args:
            probe: what was measured, if anything was.
            total_bytes: what is read at least, the layers included.
            further_walks: the layers are walked again so many times, each with this part of what
                runs through them the first time.

        Raises:
            UsageError: memory or disk have no room even so; the message names what is needed.
        """
        peak = self._host_peak(probe)
        self._check_host(peak)
        device_peak = self._device_peak(probe)
        self._check_device(device_peak)
        hidden = self._hidden_bytes(probe)
        in_ram = min(hidden, self._limits.host_bytes - peak.total_bytes)
        scratch = hidden - in_ram
        self._check_disk(scratch)
        return RunPlan(
            streams=True,
            why=self._why(),
            num_layers=len(self._layers),
            read_bytes=max(self._read_bytes(1 + len(further_walks)), total_bytes),
            peak=peak.with_part("hidden states", in_ram),
            limit_bytes=self._limits.host_bytes,
            device_peak=device_peak,
            hidden_ram_bytes=in_ram,
            scratch=self._scratch,
            scratch_bytes=scratch,
            expected_s=None
            if probe is None
            else sum(self._expect_s(probe, share) for share in (1.0, *further_walks)),
        )

    def _why(self) -> str:
        subject, limits = self._subject, self._limits
        weights = weights_bytes(subject.model, subject.itemsize)
        inside = sum(_inside(subject, head=True).values())
        needed = weights + max(inside, _loading_bytes(subject))
        if limits.device_bytes is None:
            needed += limits.process_bytes + SLACK_BYTES
            there = f"{spell_size(limits.host_bytes)} are {limits.host_why}"
        else:
            there = f"{spell_size(limits.device_bytes)} are free on the GPU"
        return f"streaming layer by layer: the model needs {spell_size(needed)}, {there}"

    def _host_peak(self, probe: Probe | None) -> Footprint:
        own = {"process": self._limits.process_bytes + SLACK_BYTES}
        if self._limits.device_bytes is None:
            return Footprint(parts={**own, **self._streamed_parts(probe)})
        stored = [replace(layer, placed=0) for layer in self._layers]
        keep = self._subject.work.changes_weights
        return Footprint(parts={**own, "layers": peak_of_layers(stored, keep=keep)})

    def _device_peak(self, probe: Probe | None) -> Footprint | None:
        if self._limits.device_bytes is None:
            return None
        return Footprint(parts=self._streamed_parts(probe, on_device=True))

    def _streamed_parts(self, probe: Probe | None, *, on_device: bool = False) -> dict[str, int]:
        subject = self._subject
        if on_device:
            layers = max(layer.placed for layer in self._layers)
        else:
            layers = peak_of_layers(self._layers, keep=subject.work.changes_weights)
        inside = _inside(subject, head=False)
        if probe is not None and probe.batch_bytes is not None and not on_device:
            inside["micro-batch"] = max(inside["micro-batch"], probe.batch_bytes)
        beside = {"embedding": self._embedding_bytes(), "around the layers": self._around_bytes}
        at_layers = layers + sum(inside.values())
        # The head comes when the last layer is gone: only what it takes above the layers counts.
        head = max(_head_bytes(subject) - at_layers, 0)
        return {**beside, "layers": layers, **inside, **({"head": head} if head else {})}

    def _embedding_bytes(self) -> int:
        subject = self._subject
        width = subject.model.config.get_text_config(decoder=True).hidden_size
        return int(subject.work.num_distinct * width * subject.itemsize)

    def _read_bytes(self, walks: int) -> int:
        layers = sum(layer.stored for layer in self._layers)
        head = head_bytes(self._subject.model, self._subject.itemsize)
        once = self._embedding_bytes() + self._around_bytes
        return walks * (layers + (head if self._subject.logits_bytes else 0)) + once

    def _hidden_bytes(self, probe: Probe | None) -> int:
        work = self._subject.work
        if probe is None:
            return hidden_bytes(self._subject.model, work, self._subject.itemsize)
        probed_tokens = max(work.rows * work.columns, 1)
        return math.ceil(probe.state_bytes * work.num_models * work.num_tokens / probed_tokens)

    def _expect_s(self, probe: Probe, share: float) -> float:
        """Expect a walk through all layers, and through the head where logits are needed."""
        subject, work = self._subject, self._subject.work
        flops = layer_flops(subject.model, subject.geometry, work.columns)
        num_batches = share * work.num_tokens / max(work.rows * work.columns, 1)
        expected = expect_duration(probe, self._layers, flops, num_batches)
        if subject.logits_bytes:
            head = 2 * head_bytes(subject.model, 1)
            expected += probe.run_s * num_batches * head / max(flops[0], 1)
        return expected

    def _check_host(self, peak: Footprint) -> None:
        limits, needed = self._limits, peak.total_bytes
        if needed <= limits.host_bytes:
            return
        parts = ", ".join(f"{name} {spell_size(size)}" for name, size in peak.parts.items())
        smallest = math.ceil((needed + _ROUNDED_BYTES) / _GIB * 100) / 100
        shrink = "a smaller --batch-size or --seq-len takes less"
        raise UsageError(
            f"even layer by layer the model needs {spell_size(needed)} ({parts}), and "
            f"{spell_size(limits.host_bytes)} are {limits.host_why}",
            hint=f"the smallest --memory that works is {smallest:.2f}; {shrink}"
            if limits.is_given
            else f"use a machine with more memory; {shrink}",
        )

    def _check_device(self, peak: Footprint | None) -> None:
        free = self._limits.device_bytes
        if peak is not None and free is not None and peak.total_bytes > free:
            raise UsageError(
                f"even layer by layer the model needs {spell_size(peak.total_bytes)} on the GPU, "
                f"and {spell_size(free)} are free",
                hint="use a smaller --batch-size or --seq-len, or --device cpu",
            )

    def _check_disk(self, scratch_bytes: int) -> None:
        free = shutil.disk_usage(self._scratch).free
        if scratch_bytes > free:
            raise UsageError(
                f"{self._scratch}: {spell_size(scratch_bytes)} of hidden states have to wait "
                f"there, and {spell_size(free)} are free",
                hint="use fewer --samples, a larger --memory, or another disk",
            )


def plan_streamed(
    subject: Streamable,
    limits: Limits,
    *,
    dtype: torch.dtype,
    device: str,
    scratch: Path,
) -> StreamPlanner:
    """Measure the layers of a model, by their shapes, for a plan to stream it.

    Args:
        subject: the model, built without weights in `dtype`.
        limits: what memory there is.
        dtype: what it computes in.
        device: where.
        scratch: folder for hidden states that memory has no room for.

    Raises:
        ModelError: a weight is missing or has another shape.
    """
    model, geometry, weights = subject.model, subject.geometry, subject.weights
    parted = PartedWeights(model, weights, subject.checkpoint, dtype=dtype, device=device)
    return StreamPlanner(
        subject,
        limits,
        [size_part(parted, part) for part in layer_parts(geometry, parted)],
        around_bytes=parted.size_bytes(part_around(model, geometry, weights, parted)),
        scratch=scratch,
    )


def _inside(subject: Streamable, *, head: bool) -> dict[str, int]:
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


def _loading_bytes(subject: Streamable) -> int:
    return loading_bytes(subject.geometry, subject.weights, subject.itemsize)


def _head_bytes(subject: Streamable) -> int:
    if not subject.logits_bytes:
        return 0
    return head_bytes(subject.model, subject.itemsize) + subject.logits_bytes


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
