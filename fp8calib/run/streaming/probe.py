"""Measure the first layer on one micro-batch, to predict the time and memory of a run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from fp8calib.machine.memory import PeakMemory, anonymous_bytes
from fp8calib.run.streaming.layer_steps import LayerState
from fp8calib.run.streaming.model import StreamedLayer, StreamedModel
from fp8calib.run.streaming.weights import PartSize

_LONG_S = 2.0
"""A first run longer than this is not repeated: warming up is a small part of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements of the first layer."""

    read_s: float
    place_s: float
    """Making its parameters from the stored tensors, and observing or changing them."""
    run_s: float
    """One micro-batch through it."""
    batch_bytes: int | None
    """Memory of the micro-batch inside the layer; None where the system has no count."""
    state_bytes: int
    """The state of the micro-batch that is stored for the next layer."""


def ignore(_: object) -> None:
    """Do nothing with a layer, or a number of steps."""


def probe_layer(
    streamed: StreamedModel,
    layers: Iterator[StreamedLayer],
    run: Callable[[], LayerState],
    *,
    on_layer_read: Callable[[StreamedLayer], None] = ignore,
    change_layer: Callable[[StreamedLayer], None] = ignore,
    keep: bool = False,
) -> Probe:
    """Measure the first of `layers`, through which `run` runs a micro-batch.

    `on_layer_read` is called when its tensors have been read, and `change_layer` when they are
    placed; with `keep` they stay in memory, to restore the weights.
    """
    started = time.monotonic()
    layer = next(layers)
    was_read = time.monotonic()
    on_layer_read(layer)
    with streamed.placed(layer, keep=keep):
        change_layer(layer)
        was_placed = time.monotonic()
        run_s, batch_bytes, state = _measure_run(run, streamed.device)
    return Probe(
        read_s=was_read - started,
        place_s=was_placed - was_read,
        run_s=run_s,
        batch_bytes=batch_bytes,
        state_bytes=sum(
            leaf.numel() * leaf.itemsize
            for leaf in pytree.tree_leaves(state)
            if isinstance(leaf, torch.Tensor)
        ),
    )


def expect_duration(
    probe: Probe, layers: Sequence[PartSize], flops: Sequence[int], num_batches: float
) -> float:
    """Predict the seconds of a run from its first layer; a layer is read while the last one runs.

    `flops` are operations per token by layer, `num_batches` counts multiples of the probed batch.
    """
    per_byte = [layer.stored / layers[0].stored for layer in layers]
    runs = [probe.run_s * num_batches * cost / max(flops[0], 1) for cost in flops]
    reads = [probe.read_s * share for share in per_byte]
    places = [probe.place_s * share for share in per_byte]
    hidden = [max(run, read) for run, read in zip(runs, [*reads[1:], 0.0], strict=True)]
    return reads[0] + sum(places) + sum(hidden)


def _measure_run(
    run: Callable[[], LayerState], device: torch.device
) -> tuple[float, int | None, LayerState]:
    before = anonymous_bytes()
    with PeakMemory() as memory:
        run_s, state = _time(run, device)
        if run_s < _LONG_S:
            again_s, state = _time(run, device)
            run_s = min(run_s, again_s)
    if before is None or memory.peak_bytes is None:
        return run_s, None, state
    return run_s, max(memory.peak_bytes - before, 0), state


def _time(run: Callable[[], LayerState], device: torch.device) -> tuple[float, LayerState]:
    started = time.monotonic()
    state = run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.monotonic() - started, state
