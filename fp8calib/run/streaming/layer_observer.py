"""Gather the statistics of a model that does not fit into memory, one decoder layer at a time.

Each layer's weights are read once, while the layer before runs; all batches run through the layer,
and its weights are dropped. Every site sees the same batches in the same order as in
`fp8calib.run.forward.whole`, so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Protocol

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
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_journal import LayerJournal
from fp8calib.run.streaming.layer_steps import LayerSteps
from fp8calib.run.streaming.model import StreamedLayer, StreamedModel
from fp8calib.stats.merge import merge_sites
from fp8calib.stats.statistic import SiteStats


class LayerWork(InputListener, Protocol):
    """Work on each layer with the inputs of its linears, beside the statistics."""

    def finish_layer(self, layer: Layer) -> None:
        """Finish a layer that all batches have run through."""

    def forget(self) -> None:
        """Drop all inputs that were received: the run starts again."""


class LayerObserver:
    """Gathers the statistics of a streamed model; its lm_head never runs."""

    def __init__(
        self,
        streamed: StreamedModel,
        observe: Observe,
        *,
        linears: Sequence[Linear],
        num_sequences: int,
        work: LayerWork | None = None,
    ) -> None:
        """Observe the weights of `linears`; other weights are only checked for NaN."""
        self._linears = {linear.module for linear in linears}
        self._streamed = streamed
        self._observe = observe
        self._work = work
        self._weights: dict[Site, SiteStats] = {}
        self._observed: set[str] = set()
        self._recorder = Recorder(num_sequences)

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
        advance: Callable[[int], None],
        journal: Journal | None = None,
        *,
        on_back_off: Callable[[BackOff], None],
    ) -> dict[Site, SiteStats]:
        """Run batches through the model; when one does not fit into memory, restart with halves.

        Args:
            batches: the micro-batches.
            advance: called with the number of tokens of each batch, in each layer.
            journal: saves the state after layers, and loads the state that an earlier run saved.
            on_back_off: called when batches become smaller.

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
                return self._observe_once(batches, count, journal)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            return_memory_of(self._streamed.device)
            count(-counted)
            self._recorder.forget()
            if self._work is not None:
                self._work.forget()
            on_back_off(BackOff(first=batches[0].first, batch_size=size))
            batches = [part for batch in batches for part in cut_into(batch, size)]

    def _observe_once(
        self, batches: Sequence[Batch], advance: Callable[[int], None], journal: Journal | None
    ) -> dict[Site, SiteStats]:
        kept = None if journal is None else LayerJournal(journal, batches)
        with self._hooked() as observer:
            self._walk(observer, batches, advance, kept)
        earlier = {} if kept is None else kept.sites
        return merge_sites([self._finish(), earlier, self._recorder.stats()])

    @contextmanager
    def _hooked(self) -> Iterator[BatchObserver]:
        prepared = self._streamed.prepared
        with open_calibration_hooks(
            prepared.model,
            prepared.geometry,
            self._recorder,
            self._observe,
            ignored=prepared.ignored,
            listener=self._work,
        ) as new_cache:
            yield BatchObserver(prepared.model, self._recorder, new_cache)

    def _walk(
        self,
        observer: BatchObserver,
        batches: Sequence[Batch],
        advance: Callable[[int], None],
        journal: LayerJournal | None,
    ) -> None:
        """Run all batches through every layer in turn."""
        streamed = self._streamed
        with ExitStack() as stack:
            store = stack.enter_context(streamed.open_hidden_states())
            first = 0 if journal is None else journal.load(store)

            steps = stack.enter_context(streamed.steps(observer.decoder, batches, store))
            advance(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(streamed.layers()):
                self._observe_layer(layer)
                if layer.layer.index < first:
                    streamed.begin_next()
                    continue
                with streamed.placed(layer):
                    self._run_layer(observer, steps, store, layer, batches, advance)
                    if self._work is not None:
                        self._work.finish_layer(layer.layer)
                if journal is not None and self._has_next(layer):
                    journal.save_if_due(layer.layer.index, store, self._recorder.stats())

    def _run_layer(
        self,
        observer: BatchObserver,
        steps: LayerSteps,
        store: HiddenStateStore,
        layer: StreamedLayer,
        batches: Sequence[Batch],
        advance: Callable[[int], None],
    ) -> None:
        index = layer.layer.index
        for number, batch in enumerate(batches):
            before = store.get(number, observer.decoder.device) if index else None
            with observer.observed(batch) as cache:
                after = steps.run_layer(index, batch, cache, before, checks=number == 0)
            if self._has_next(layer):
                store.put(number, after)
            advance(batch.num_tokens)
            observer.check_if_due()
        observer.require_finite()

    def _has_next(self, layer: StreamedLayer) -> bool:
        return layer.layer.index < len(self._streamed.geometry.layers) - 1

    def _observe_layer(self, layer: StreamedLayer) -> None:
        if not self._observe.weights:
            return
        ignored = self._streamed.prepared.ignored
        linears = [each for each in layer.layer.linears if each.module in self._linears]
        self._weights |= observe_weights(linears, layer.weights, ignored=ignored)
        read = layer.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
        self._observed.update(layer.part.tensors)

    def _finish(self) -> dict[Site, SiteStats]:
        if self._observe.weights:
            checkpoint = self._streamed.checkpoint
            others = [name for name in checkpoint.tensors if name not in self._observed]
            check_other_weights(checkpoint, others)
        return self._weights
