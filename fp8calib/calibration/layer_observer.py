"""Gather the statistics of a model that does not fit into memory, one decoder layer at a time.

Each layer's weights are read once, while the layer before runs; all batches run through the layer,
and its weights are dropped. Every site sees the same batches in the same order as in a whole model,
so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from fp8calib.calibration.decoder import OutOfMemoryInForward
from fp8calib.calibration.header import BackOff
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.observed_batches import BatchObserver, cut_into
from fp8calib.calibration.recorder import LayerWork
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel
from fp8calib.calibration.weight_stats import check_other_weights, observe_weights
from fp8calib.data.sequences import Batch
from fp8calib.machine.allocator import return_memory_of
from fp8calib.machine.progress import Progress
from fp8calib.model.shapes import Linear, Site


class LayerObserver:
    """Gathers the statistics of a streamed model; its lm_head never runs."""

    def __init__(
        self,
        streamed: StreamedModel,
        linears: Sequence[Linear] | None,
        progress: Progress,
        *,
        work: LayerWork | None = None,
        journal: Journal | None = None,
    ) -> None:
        """Observe the weights of `linears`, and look for NaN in other weights; None: in none."""
        self._streamed = streamed
        self._num_layers = len(streamed.geometry.layers)
        self._linears = None if linears is None else {linear.module for linear in linears}
        self._progress = progress
        self._work = work
        self._journal = journal
        self._weights: dict[Site, SiteStats] = {}
        self._read: set[str] = set()
        """The tensors of layers whose weights are observed."""
        self._counted = 0

    def observe_weights(self) -> dict[Site, SiteStats]:
        """Read and observe the weights alone."""
        self._progress.stage("reading weights", self._num_layers, unit="layers")
        with self._streamed.layers() as layers:
            for layer in layers:
                self._observe_weights(layer)
                self._progress.advance(1)
        self._check_others()
        return self._weights

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
            return_memory_of(self._streamed.device)
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
                self._observe_weights(layer)
                index = layer.layer.index
                if index < first:
                    continue
                with streamed.placed(layer):
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
        self._check_others()
        earlier = {} if journal is None else journal.layer_sites
        return merge_sites([self._weights, earlier, observer.recorder.stats()])

    def _count(self, steps: int) -> None:
        self._counted += steps
        self._progress.advance(steps)

    def _observe_weights(self, layer: StreamedLayer) -> None:
        if self._linears is None:
            return
        ignored = self._streamed.prepared.ignored
        linears = [each for each in layer.layer.linears if each.module in self._linears]
        self._weights |= observe_weights(linears, layer.weights, ignored=ignored)
        read = layer.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
        self._read.update(layer.part.tensors)

    def _check_others(self) -> None:
        """Look for NaN in the tensors outside the layers."""
        if self._linears is not None:
            checkpoint = self._streamed.checkpoint
            others = [name for name in checkpoint.tensors if name not in self._read]
            check_other_weights(checkpoint, others)
