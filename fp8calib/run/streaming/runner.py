"""Drive batches through a model that does not fit into memory, one decoder layer at a time.

Every layer's weights are read once, see all batches, and are dropped before the next layer's are
needed; those are read ahead meanwhile. Batches, and the order in which a site sees them, are those
of `fp8calib.run.whole`, so the statistics are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from fp8calib.data.plan import Batch
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Site
from fp8calib.observe.hooks import HookedCache
from fp8calib.observe.recorder import Recorder, view_batch
from fp8calib.run.forward.decoder import Decoder
from fp8calib.run.forward.whole import GPU_BATCHES_PER_CHECK, nonfinite_error, one_by_one
from fp8calib.run.streaming.hidden_states import HiddenStateStore
from fp8calib.run.streaming.layer_journal import LayerJournal
from fp8calib.run.streaming.layer_steps import LayerState, LayerSteps, open_steps
from fp8calib.run.streaming.model import (
    StreamedLayer,
    StreamedModel,
    Streaming,
    load_state,
    open_hidden_states,
)
from fp8calib.run.streaming.probe import FirstLayer


class _NonfiniteError(Exception):
    """NaN or inf was met at a site of layer `index`, in one of a group of batches."""

    def __init__(self, site: Site, group: Sequence[Batch], index: int) -> None:
        super().__init__()
        self.site = site
        self.group = group
        self.index = index


def _ignore(_: object) -> None:
    return None


class StreamedRunner:
    """Runs the text decoder (never the lm_head) layer by layer, and shows all to a recorder."""

    def __init__(
        self,
        streamed: StreamedModel,
        streaming: Streaming,
        new_cache: Callable[[], HookedCache],
    ) -> None:
        """Take from `open_calibration_hooks` the function that makes a batch's cache."""
        self._streamed = streamed
        self._streaming = streaming
        self._decoder = Decoder(streamed.model)
        self._new_cache = new_cache

    def run(
        self,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
        *,
        on_layer_read: Callable[[StreamedLayer], None],
        journal: LayerJournal | None = None,
    ) -> None:
        """Run all batches through every layer in turn.

        Args:
            batches: the micro-batches.
            recorder: is shown them, once a layer.
            advance: is told the tokens of each, once a layer.
            on_layer_read: is shown every layer when its tensors were read, before it runs.
            journal: keeps what was seen, and says which layers an earlier run has run.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names layer and sample.
        """
        try:
            self._walk(batches, recorder, advance, on_layer_read, until=None, journal=journal)
        except _NonfiniteError as error:
            raise self._locate(error, recorder) from None

    @contextmanager
    def first_layer(self, batch: Batch, recorder: Recorder) -> Iterator[FirstLayer]:
        """Open the first layer alone, to try it with one micro-batch."""
        with ExitStack() as stack:
            steps = stack.enter_context(open_steps(self._decoder, self._streamed.layer_modules()))
            layers = stack.enter_context(self._streamed.layers(until=1))

            def run() -> LayerState:
                return self._run_batch(steps, 0, batch, recorder, None, checks=False)

            yield FirstLayer(layers=layers, run=run)

    def _locate(self, found: _NonfiniteError, recorder: Recorder) -> CalibrationError:
        """Go down to the layer again, one sequence at a time: that finds the one at fault."""
        dtype = self._decoder.dtype
        if len(found.group) == 1 and len(found.group[0].lengths) == 1:
            return nonfinite_error(found.site, found.group[0].first, dtype)
        for single in one_by_one(found.group):
            recorder.forget()
            try:
                self._walk([single], recorder, _ignore, _ignore, until=found.index + 1)
            except _NonfiniteError as error:
                return nonfinite_error(error.site, single.first, dtype)
        return CalibrationError("NaN or inf in an activation of a batch, but in no sequence alone")

    def _walk(
        self,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
        on_layer_read: Callable[[StreamedLayer], None],
        *,
        until: int | None,
        journal: LayerJournal | None = None,
    ) -> None:
        with ExitStack() as stack:
            steps = stack.enter_context(open_steps(self._decoder, self._streamed.layer_modules()))
            store = stack.enter_context(open_hidden_states(self._streaming))
            first = 0 if journal is None else journal.load(store)
            advance(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(self._streamed.layers(until=until)):
                on_layer_read(layer)
                if layer.layer.index < first:
                    self._streamed.skip_layer()
                    continue
                with self._streamed.placed(layer):
                    self._run_layer(steps, store, layer, batches, recorder, advance)
                if journal is not None and self._has_next(layer):
                    journal.save_if_due(layer.layer.index, store, recorder.stats())

    def _run_layer(
        self,
        steps: LayerSteps,
        store: HiddenStateStore,
        layer: StreamedLayer,
        batches: Sequence[Batch],
        recorder: Recorder,
        advance: Callable[[int], None],
    ) -> None:
        index, unchecked = layer.layer.index, []
        for number, batch in enumerate(batches):
            self._step(steps, store, index, number, batch, recorder)
            unchecked.append(batch)
            advance(batch.num_tokens)
            if self._is_full(unchecked) or number == len(batches) - 1:
                if (site := recorder.check_finite()) is not None:
                    raise _NonfiniteError(site, unchecked, index)
                unchecked = []

    def _has_next(self, layer: StreamedLayer) -> bool:
        return layer.layer.index < len(self._streamed.geometry.layers) - 1

    def _is_full(self, group: Sequence[Batch]) -> bool:
        return self._decoder.device.type == "cpu" or len(group) >= GPU_BATCHES_PER_CHECK

    def _step(
        self,
        steps: LayerSteps,
        store: HiddenStateStore,
        index: int,
        number: int,
        batch: Batch,
        recorder: Recorder,
    ) -> None:
        before = load_state(store, number, self._decoder.device) if index else None
        after = self._run_batch(steps, index, batch, recorder, before, checks=number == 0)
        if index < len(self._streamed.geometry.layers) - 1:
            store.put(number, (after.output, after.shared))

    def _run_batch(
        self,
        steps: LayerSteps,
        index: int,
        batch: Batch,
        recorder: Recorder,
        before: LayerState | None,
        *,
        checks: bool,
    ) -> LayerState:
        rows, columns = batch.input_ids.shape
        recorder.begin_batch(view_batch((rows, columns), batch.lengths, batch.first, batch.quarter))
        after = steps.run_layer(index, batch, self._new_cache(), before, checks=checks)
        recorder.end_batch()
        return after
