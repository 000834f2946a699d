"""The plan of a streamed run: from the formula alone, then from a probe's measurements."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from fp8calib.errors import UsageError
from fp8calib.machine.units import GIB, format_gib
from fp8calib.run.memory_plan.footprint import (
    SLACK_BYTES,
    head_bytes,
    hidden_bytes,
    media_bytes,
    peak_of_layers,
)
from fp8calib.run.memory_plan.limits import Limits
from fp8calib.run.memory_plan.plan import (
    MemoryPlan,
    PlanInputs,
    compare_whole,
    describe_peak,
    working_parts,
)
from fp8calib.run.streaming.model import layer_parts, part_of_towers, part_outside_layers
from fp8calib.run.streaming.probe import Probe
from fp8calib.run.streaming.weights import PartLoader

_ROUNDED_BYTES = 2**25
"""A margin on the smallest --memory: two runs of one command differ by less."""


class StreamPlanner:
    """Plans to stream a model, with or without the measurements of a probe."""

    def __init__(self, subject: PlanInputs, limits: Limits, scratch: Path) -> None:
        """Measure the layers by their shapes; the model is built without weights, in its dtype.

        Raises:
            ModelError: a weight is missing or has another shape.
        """
        model, geometry = subject.prepared.model, subject.prepared.geometry
        loader = PartLoader(
            subject.prepared.weights,
            subject.checkpoint,
            dtype=subject.dtype,
            device=subject.device,
        )
        outside = part_outside_layers(geometry, loader)
        self._layers = [loader.measure(part) for part in layer_parts(geometry, loader)]
        self._outside_bytes = loader.measure(outside).placed
        # The towers are dropped before the first layer is read.
        towers = loader.measure(part_of_towers(loader)) if subject.work.num_media_tokens else None
        self._towers = 0 if towers is None else max(towers.stored, towers.placed) + towers.step
        self._subject = subject
        self._model, self._geometry = model, geometry
        self._limits = limits
        self._scratch = scratch
        # Before a probe: it replaces embeddings by some of their rows, and the model gets smaller.
        self._why = f"streaming layer by layer: the model needs {compare_whole(subject, limits)[1]}"

    def plan(
        self,
        probe: Probe | None = None,
        *,
        total_bytes: int = 0,
        walks: int = 1,
    ) -> MemoryPlan:
        """Plan the run.

        Args:
            probe: the measurements of the first layer; None before there are any.
            total_bytes: the bytes read at least, layers included.
            walks: how often all layers are read.

        Raises:
            UsageError: memory or disk are too small even so; the message names what is needed.
        """
        peak = self._host_peak(probe)
        self._check_host(peak)
        on_gpu = self._limits.device_bytes is not None
        device_peak = self._device_peak(probe) if on_gpu else None
        self._check_device(device_peak)
        hidden = self._hidden_bytes(probe)
        in_ram = min(hidden, self._limits.host_bytes - sum(peak.values()))
        scratch = hidden - in_ram
        self._check_disk(scratch * self._limits.sharers)
        return MemoryPlan(
            streams=True,
            why=self._why,
            num_layers=len(self._layers),
            read_bytes=max(self._read_bytes(walks), total_bytes),
            peak={**peak, "hidden states": in_ram},
            limit_bytes=self._limits.host_bytes,
            device_peak=device_peak,
            hidden_ram_bytes=in_ram,
            scratch=self._scratch,
            scratch_bytes=scratch,
        )

    def _host_peak(self, probe: Probe | None) -> dict[str, int]:
        own = {"process": self._limits.process_bytes + SLACK_BYTES}
        keep = self._subject.work.changes_weights
        if self._limits.device_bytes is None:
            layers = max(peak_of_layers(self._layers, keep=keep), self._towers)
            return {**own, **self._streamed_parts(probe, layers)}
        stored = [replace(layer, placed=0) for layer in self._layers]
        layers = max(peak_of_layers(stored, keep=keep), self._towers)
        return {**own, "layers": layers}

    def _device_peak(self, probe: Probe | None) -> dict[str, int]:
        layers = max(layer.placed for layer in self._layers)
        return self._streamed_parts(probe, max(layers, self._towers))

    def _streamed_parts(self, probe: Probe | None, layers: int) -> dict[str, int]:
        """Compute the bytes where the model runs, `layers` of them for the weights of layers."""
        subject = self._subject
        inside = working_parts(subject, head=False)
        if (
            probe is not None
            and probe.batch_bytes is not None
            and self._limits.device_bytes is None
        ):
            inside["micro-batch"] = max(inside["micro-batch"], probe.batch_bytes)
        beside = {"embedding": self._embedding_bytes(), "around the layers": self._outside_bytes}
        at_layers = layers + sum(inside.values())
        # The head runs after the last layer is dropped: only what it needs beyond a layer counts.
        logits = subject.logits_bytes
        head_needs = head_bytes(self._model, subject.itemsize) + logits if logits else 0
        head = max(head_needs - at_layers, 0)
        return {**beside, "layers": layers, **inside, **({"head": head} if head else {})}

    def _embedding_bytes(self) -> int:
        subject = self._subject
        width = self._model.config.get_text_config(decoder=True).hidden_size
        return int(subject.work.num_distinct * width * subject.itemsize)

    def _read_bytes(self, walks: int) -> int:
        layers = sum(layer.stored for layer in self._layers)
        head = head_bytes(self._model, self._subject.itemsize)
        once = self._embedding_bytes() + self._outside_bytes
        return walks * (layers + (head if self._subject.logits_bytes else 0)) + once

    def _hidden_bytes(self, probe: Probe | None) -> int:
        model, work, itemsize = self._model, self._subject.work, self._subject.itemsize
        media = media_bytes(model, work, itemsize)
        if probe is None:
            return media + hidden_bytes(model, work, itemsize)
        probed_tokens = max(work.rows * work.columns, 1)
        states = probe.state_bytes * work.num_models * work.num_tokens / probed_tokens
        return media + math.ceil(states)

    def _check_host(self, peak: Mapping[str, int]) -> None:
        limits, needed = self._limits, sum(peak.values())
        if needed <= limits.host_bytes:
            return
        smallest = math.ceil((needed + _ROUNDED_BYTES) / GIB * 100) / 100
        shrink = "a smaller --batch-size or --seq-len needs less"
        raise UsageError(
            f"even layer by layer the model needs {describe_peak(peak)}, but "
            f"{format_gib(limits.host_bytes)} are {limits.host_why}",
            hint=f"the smallest --memory that works is {smallest:.2f}; {shrink}"
            if limits.is_given
            else f"use a machine with more memory; {shrink}",
        )

    def _check_device(self, peak: Mapping[str, int] | None) -> None:
        free = self._limits.device_bytes
        if peak is not None and free is not None and (needed := sum(peak.values())) > free:
            raise UsageError(
                f"even layer by layer the model needs {format_gib(needed)} on the GPU, "
                f"but {format_gib(free)} are free",
                hint="use a smaller --batch-size or --seq-len, or --device cpu",
            )

    def _check_disk(self, scratch_bytes: int) -> None:
        free = shutil.disk_usage(self._scratch).free
        if scratch_bytes > free:
            raise UsageError(
                f"{self._scratch}: {format_gib(scratch_bytes)} of hidden states have to be stored "
                f"there, but {format_gib(free)} are free",
                hint="use fewer --samples, a larger --memory, or another disk",
            )
