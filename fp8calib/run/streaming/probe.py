"""Measure the first layer on one micro-batch, to predict the memory of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch.utils import _pytree as pytree

from fp8calib.machine.memory import PeakMemory, anonymous_bytes
from fp8calib.run.streaming.layer_steps import LayerState
from fp8calib.run.streaming.model import StreamedLayer, StreamedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The measurements of the first layer."""

    batch_bytes: int | None
    """Memory of the micro-batch inside the layer; None where the system has no count."""
    state_bytes: int
    """The state of the micro-batch that is stored for the next layer."""


def probe_layer(
    streamed: StreamedModel, layers: Iterator[StreamedLayer], run: Callable[[], LayerState]
) -> Probe:
    """Measure the first of `layers`, through which `run` runs a micro-batch."""
    with streamed.placed(next(layers)):
        before = anonymous_bytes()
        with PeakMemory() as memory:
            state = run()
    peak = memory.peak_bytes
    return Probe(
        batch_bytes=None if before is None or peak is None else max(peak - before, 0),
        state_bytes=sum(
            leaf.numel() * leaf.itemsize
            for leaf in pytree.tree_leaves(state)
            if isinstance(leaf, torch.Tensor)
        ),
    )
