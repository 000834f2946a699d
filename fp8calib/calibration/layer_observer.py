"""Gather the statistics of a model that does not fit into memory, one decoder layer at a time.

Each layer's weights are read once, while the layer before runs; all batches run through the layer,
and its weights are dropped. Every site sees the same batches in the same order as in a whole model,
so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from fp8calib.calibration.allocator import return_memory_of
from fp8calib.calibration.decoder import OutOfMemoryInForward
from fp8calib.calibration.header import BackOff
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.observed_batches import BatchObserver, cut_into
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import LayerWork
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel
from fp8calib.calibration.weight_stats import (
    check_other_weights,
    observe_weights,
    settle_weights,
)
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES
from fp8calib.data.sequences import Batch
from fp8calib.model.shapes import Linear, Site
from fp8calib.model.weight_source import WeightSource


class LayerObserver:
    """Gathers the statistics of a streamed model; its lm_head never runs.

    Attributes:
        device: the device that the layers run on.
        tensors: those that the layers are made from.
    """

    def __init__(
        self,
        streamed: StreamedModel,
        linears: Sequence[Linear] | None,
        progress: Progress,
        *,
        work: LayerWork | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Observe the weights of `linears`, and look for NaN in others of layers; None: in none."""
        self.device = streamed.device
        self.tensors = frozenset(name for part in streamed.parts for name in part.tensors)
        self._streamed = streamed
        self._num_layers = len(streamed.geometry.layers)
        self._linears = None if linears is None else {linear.module for linear in linears}
        self._progress = progress
        self._work = work
        self._journal = journal
        self._weights: dict[Site, SiteStats] = {}
        self._counted = 0

    def observe_weights(self) -> None:
        """Read and observe the weights alone."""
        self._progress.stage("reading weights", self._num_layers, unit="layers")
        with self._streamed.layers() as layers:
            for layer in layers:
                self._observe_weights(layer, will_be_placed=False)
                self._progress.advance(1)

    def observe(
        self, observer: BatchObserver, batches: Sequence[Batch], back_offs: list[BackOff]
    ) -> dict[Site, SiteStats]:
        """Run batches through the model; when one does not fit into memory, restart with halves.

        `back_offs` tells where batches became smaller.

        Raises:
            ModelError: a weight is NaN or inf.
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        steps = sum(batch.num_tokens for batch in batches) * self._num_layers
        self._progress.stage("layer by layer", steps, unit="tokens", layers=self._num_layers)
        size = max(len(batch.lengths) for batch in batches)
        while True:
            try:
                return self._walk(observer, batches)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            return_memory_of(self.device)
            self._count(-self._counted)
            observer.recorder.forget()
            if self._work is not None:
                self._work.forget()
            back_offs.append(BackOff(first=batches[0].first, batch_size=size))
            batches = [part for batch in batches for part in cut_into(batch, size)]

    def _walk(self, observer: BatchObserver, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
        """Run all batches through every layer in turn."""
        streamed, journal, first = self._streamed, self._journal, 0
        last = self._num_layers - 1
        with ExitStack() as stack:
            store = stack.enter_context(streamed.open_hidden_states())
            if journal is not None:
                first = journal.load_layer(batches, store)
            steps = stack.enter_context(streamed.steps(observer.decoder, batches, store))
            self._count(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(streamed.layers()):
                index = layer.layer.index
                left = self._observe_weights(layer, will_be_placed=index >= first)
                if index < first:
                    continue
                with streamed.placed(layer):
                    self._observe(left, layer.weights.reading_loaded())
                    for number, batch in enumerate(batches):
                        before = store.get(number, observer.decoder.device) if index else None
                        with observer.observed(batch) as cache:
                            checks = number == 0
                            after = steps.run_layer(index, batch, cache, before, checks=checks)
                        if index < last:
                            store.put(number, after)
                        self._count(batch.num_tokens)
                        observer.check(at_end=number == len(batches) - 1)
                    if self._work is not None:
                        self._work.finish_layer(layer.layer)
                if journal is not None and index < last:
                    journal.save_layer(index, batches, store, observer.recorder)
        earlier = {} if journal is None else journal.layer_sites
        return merge_sites([earlier, observer.recorder.stats()])

    def _count(self, steps: int) -> None:
        self._counted += steps
        self._progress.advance(steps)

    def _observe_weights(self, layer: StreamedLayer, *, will_be_placed: bool) -> Sequence[Linear]:
        """Observe weights on the CPU, and give those that are left for the GPU."""
        if self._linears is None:
            return ()
        linears = [each for each in layer.layer.linears if each.module in self._linears]
        read = layer.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
        stored = {TORCH_DTYPES[layer.held.tensors[name].dtype] for name in read}
        is_gpu = self.device.type == "cuda"
        if will_be_placed and is_gpu and stored == {self._streamed.model.dtype}:
            return linears
        self._observe(linears, layer.weights)
        return ()

    def _observe(self, linears: Sequence[Linear], weights: WeightSource) -> None:
        self._weights |= observe_weights(linears, weights, ignored=self._streamed.prepared.ignored)

    def finish_weights(self) -> dict[Site, SiteStats]:
        """Give the statistics of the weights of all layers that have run.

        Raises:
            ModelError: one is NaN or inf; the message names tensor and index.
        """
        linears = [each for layer in self._streamed.geometry.layers for each in layer.linears]
        return settle_weights(self._weights, linears, self._streamed.prepared.weights)
