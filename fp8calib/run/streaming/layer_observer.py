"""Gather the statistics of weights and activations while a model is streamed."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Protocol

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch
from fp8calib.geometry.model_geometry import Layer, Linear
from fp8calib.geometry.sites import Site
from fp8calib.machine.allocator import return_memory_of
from fp8calib.model.weight_stats import check_other_weights, observe_weights
from fp8calib.observe.calibration_hooks import InputListener, open_calibration_hooks
from fp8calib.observe.recorder import Recorder
from fp8calib.recipe import Observe
from fp8calib.run.forward.back_off import BackOff
from fp8calib.run.forward.decoder import OutOfMemoryInForward
from fp8calib.run.forward.observed_batches import BatchObserver, cut_into
from fp8calib.run.resume.journal import Journal
from fp8calib.run.streaming.layer_journal import LayerJournal
from fp8calib.run.streaming.model import StreamedLayer, StreamedModel, Streaming
from fp8calib.run.streaming.probe import Probe
from fp8calib.run.streaming.runner import StreamedRunner
from fp8calib.stats.merge import merge_sites
from fp8calib.stats.statistic import SiteStats


class LayerWork(InputListener, Protocol):
    """Work on each layer with the inputs of its linears, beside the statistics."""

    def finish_layer(self, layer: Layer) -> None:
        """Finish a layer that all batches have run through."""

    def forget(self) -> None:
        """Drop all inputs that were received: the run starts again."""


class LayerObserver:
    """Gathers the statistics of a streamed model."""

    def __init__(
        self,
        streamed: StreamedModel,
        checkpoint: Checkpoint,
        observe: Observe,
        *,
        ignored: Collection[str],
        towers: Collection[Linear] = (),
        linears: Sequence[Linear],
        work: LayerWork | None = None,
    ) -> None:
        """Observe the weights of `linears`; other weights are only checked for NaN.

        Of `towers` the inputs are observed, and the attention around them.
        """
        self._linears = {linear.module for linear in linears}
        self._streamed = streamed
        self._checkpoint = checkpoint
        self._observe = observe
        self._ignored = ignored
        self._towers = towers
        self._work = work
        self._weights: dict[Site, SiteStats] = {}
        self._observed: set[str] = set()
        self.recorder = Recorder()

    def probe(self, batch: Batch, streaming: Streaming) -> Probe:
        """Measure the first layer on one micro-batch; its observations are kept.

        A micro-batch that does not fit into memory is halved, and the measurements doubled.
        """
        try:
            with self._runner(streaming) as runner:
                return runner.probe(batch, on_layer_read=self._observe_layer)
        except OutOfMemoryInForward:
            size = len(batch.lengths) // 2
            if not size:
                raise
        half = self.probe(cut_into(batch, size)[0], streaming)
        parts = len(batch.lengths) / size
        return replace(
            half, run_s=half.run_s * parts, state_bytes=math.ceil(half.state_bytes * parts)
        )

    def observe_weights(self, advance: Callable[[int], None]) -> dict[Site, SiteStats]:
        """Read and observe the weights alone.

        Raises:
            ModelError: a weight is NaN or inf.
        """
        with self._streamed.layers() as layers:
            for layer in layers:
                self._observe_layer(layer)
                self._streamed.begin_next()
                advance(1)
        return self._finish()

    def observe(
        self,
        batches: Sequence[Batch],
        streaming: Streaming,
        advance: Callable[[int], None],
        journal: Journal | None = None,
        *,
        on_back_off: Callable[[BackOff], None],
    ) -> dict[Site, SiteStats]:
        """Run batches through the model; when one does not fit into memory, restart with halves.

        Raises:
            ModelError: a weight is NaN or inf.
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        size = max(len(batch.lengths) for batch in batches)
        counted = 0

        def count(steps: int) -> None:
            nonlocal counted
            counted += steps
            advance(steps)

        while True:
            try:
                return self._observe_once(batches, streaming, count, journal)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            return_memory_of(self._streamed.device)
            count(-counted)
            self._forget()
            on_back_off(BackOff(first=batches[0].first, batch_size=size))
            batches = [part for batch in batches for part in cut_into(batch, size)]

    def _observe_once(
        self,
        batches: Sequence[Batch],
        streaming: Streaming,
        advance: Callable[[int], None],
        journal: Journal | None,
    ) -> dict[Site, SiteStats]:
        kept = None if journal is None else LayerJournal(journal, batches)
        with self._runner(streaming) as runner:
            runner.run(
                batches,
                advance,
                on_layer_read=self._observe_layer,
                on_layer_run=self._finish_layer,
                journal=kept,
            )
        earlier = {} if kept is None else kept.sites
        return merge_sites([self._finish(), earlier, self.recorder.stats()])

    @contextmanager
    def _runner(self, streaming: Streaming) -> Iterator[StreamedRunner]:
        streamed = self._streamed
        with open_calibration_hooks(
            streamed.model,
            streamed.geometry,
            self.recorder,
            self._observe,
            ignored=self._ignored,
            towers=self._towers,
            listener=self._work,
        ) as new_cache:
            observer = BatchObserver(streamed.model, self.recorder, new_cache)
            yield StreamedRunner(streamed, streaming, observer)

    def _observe_layer(self, layer: StreamedLayer) -> None:
        if not self._observe.weights:
            return
        linears = [each for each in layer.layer.linears if each.module in self._linears]
        self._weights |= observe_weights(
            self._streamed.model, linears, layer.weights, ignored=self._ignored
        )
        read = layer.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
        self._observed.update(layer.part.tensors)

    def _finish_layer(self, layer: StreamedLayer) -> None:
        if self._work is not None:
            self._work.finish_layer(layer.layer)

    def _forget(self) -> None:
        self.recorder.forget()
        if self._work is not None:
            self._work.forget()

    def _finish(self) -> dict[Site, SiteStats]:
        if self._observe.weights:
            others = [name for name in self._checkpoint.tensors if name not in self._observed]
            check_other_weights(self._checkpoint, others)
        return self._weights
