"""Run batches through a model that does not fit into memory, one decoder layer at a time.

Each layer's weights are read once, while the layer before runs; all batches run through the layer,
and its weights are dropped. Every site sees the same batches in the same order as in
`fp8calib.run.forward.whole`, so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack

from fp8calib.data.sequences import Batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Site
from fp8calib.run.forward.decoder import DecoderCall
from fp8calib.run.forward.observed_batches import BatchObserver, nonfinite_error
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_journal import LayerJournal
from fp8calib.run.streaming.layer_steps import LayerState, LayerSteps
from fp8calib.run.streaming.model import (
    StreamedLayer,
    StreamedModel,
    Streaming,
    open_hidden_states,
)
from fp8calib.run.streaming.probe import Probe, ignore, probe_layer


class _NonfiniteError(Exception):
    """A site of layer `index` has NaN or inf in one of a group of batches."""

    def __init__(self, site: Site, group: Sequence[Batch], index: int) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.index = index


class StreamedRunner:
    """Runs the text decoder (never the lm_head) layer by layer, every batch observed."""

    def __init__(
        self, streamed: StreamedModel, streaming: Streaming, observer: BatchObserver
    ) -> None:
        self._streamed = streamed
        self._streaming = streaming
        self._observer = observer
        self._decoder = observer.decoder

    def run(
        self,
        batches: Sequence[Batch],
        advance: Callable[[int], None],
        *,
        on_layer_read: Callable[[StreamedLayer], None],
        on_layer_run: Callable[[StreamedLayer], None] = ignore,
        journal: LayerJournal | None = None,
    ) -> None:
        """Run all batches through every layer in turn.

        Args:
            batches: the micro-batches.
            advance: called with the number of tokens of each batch, in each layer.
            on_layer_read: called with each layer when its tensors have been read, before it runs.
            on_layer_run: called with each layer that has run all batches, while it is placed.
            journal: saves the state after layers, and loads the state that an earlier run saved.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names layer and sample.
        """
        try:
            self._walk(batches, advance, on_layer_read, on_layer_run, until=None, journal=journal)
        except _NonfiniteError as error:
            raise self._locate(error) from None

    def probe(self, batch: Batch, *, on_layer_read: Callable[[StreamedLayer], None]) -> Probe:
        """Measure the first layer on one micro-batch (`probe_layer`)."""
        with ExitStack() as stack:
            store = stack.enter_context(open_hidden_states(self._streaming))
            steps = stack.enter_context(self._steps([batch], store, observes=False))
            layers = stack.enter_context(self._streamed.layers(until=1))

            def run() -> LayerState:
                return self._run_batch(steps, 0, batch, None, checks=False)

            return probe_layer(self._streamed, layers, run, on_layer_read=on_layer_read)

    def _steps(
        self, batches: Sequence[Batch], store: HiddenStateStore, *, observes: bool = True
    ) -> AbstractContextManager[LayerSteps]:
        def prepare(batch: Batch) -> DecoderCall:
            with self._observer.observed(batch) as cache:
                return self._decoder.prepare(batch, cache)

        return self._streamed.steps(self._decoder, batches, store, prepare if observes else None)

    def _locate(self, found: _NonfiniteError) -> CalibrationError:
        """Run the layers down to the failed one again, for each sequence alone."""
        if len(found.group) == 1 and len(found.group[0].lengths) == 1:
            return nonfinite_error(found.site, found.group[0].first, self._decoder.dtype)

        def find_site(sequence: Batch) -> Site | None:
            try:
                self._walk([sequence], ignore, ignore, ignore, until=found.index + 1)
            except _NonfiniteError as error:
                return error.site
            return None

        return self._observer.locate_nonfinite(found.group, find_site)

    def _walk(
        self,
        batches: Sequence[Batch],
        advance: Callable[[int], None],
        on_layer_read: Callable[[StreamedLayer], None],
        on_layer_run: Callable[[StreamedLayer], None],
        *,
        until: int | None,
        journal: LayerJournal | None = None,
    ) -> None:
        with ExitStack() as stack:
            store = stack.enter_context(open_hidden_states(self._streaming))
            first = 0 if journal is None else journal.load(store)
            # A run that goes on has the statistics of its towers.
            steps = stack.enter_context(self._steps(batches, store, observes=not first))
            advance(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(self._streamed.layers(until=until)):
                on_layer_read(layer)
                if layer.layer.index < first:
                    self._streamed.begin_next()
                    continue
                with self._streamed.placed(layer):
                    self._run_layer(steps, store, layer, batches, advance)
                    on_layer_run(layer)
                if journal is not None and self._has_next(layer):
                    journal.save_if_due(layer.layer.index, store, self._observer.recorder.stats())

    def _run_layer(
        self,
        steps: LayerSteps,
        store: HiddenStateStore,
        layer: StreamedLayer,
        batches: Sequence[Batch],
        advance: Callable[[int], None],
    ) -> None:
        index, unchecked = layer.layer.index, []
        for number, batch in enumerate(batches):
            before = store.get(number, self._decoder.device) if index else None
            after = self._run_batch(steps, index, batch, before, checks=number == 0)
            if self._has_next(layer):
                store.put(number, after)
            unchecked.append(batch)
            advance(batch.num_tokens)
            if self._observer.is_check_due(unchecked) or number == len(batches) - 1:
                if (site := self._observer.recorder.check_finite()) is not None:
                    raise _NonfiniteError(site, unchecked, index)
                unchecked = []

    def _has_next(self, layer: StreamedLayer) -> bool:
        return layer.layer.index < len(self._streamed.geometry.layers) - 1

    def _run_batch(
        self,
        steps: LayerSteps,
        index: int,
        batch: Batch,
        before: LayerState | None,
        *,
        checks: bool,
    ) -> LayerState:
        with self._observer.observed(batch) as cache:
            return steps.run_layer(index, batch, cache, before, checks=checks)
