"""Run batches through a model, whole or one decoder layer at a time, and gather its statistics.

In a streamed model each layer's weights are read once, while the layer before runs; all batches run
through the layer, and its weights are dropped. Every site sees the same batches in the same order
as in a whole model, so the statistics are the same, bit for bit. The lm_head never runs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from transformers import PreTrainedModel

from fp8calib.calibration.allocator import return_freed_memory, return_memory_of
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.header import BackOff
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.journal import INTERVAL_S, Journal
from fp8calib.calibration.kernel_trial import gpus_of
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import LayerWork, Recorder
from fp8calib.calibration.reductions import BatchView, try_kernels
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel
from fp8calib.calibration.weight_stats import check_other_weights, observe_weights
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.data.sequences import Batch, cut_into
from fp8calib.errors import CalibrationError
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import Linear, Role, Site
from fp8calib.model.weight_source import WeightSource

_GPU_BATCH_TOKENS = 8192
"""About as many keep a GPU busy; the same on every GPU, so that shards and resumed runs agree."""


def choose_batch_size(device: str, seq_len: int) -> int:
    """Choose how many sequences a batch has where the user does not."""
    return 1 if device == "cpu" else max(1, _GPU_BATCH_TOKENS // seq_len)


class BatchObserver:
    """Shows the forward passes of batches to a recorder; made by `open_observer`."""

    def __init__(
        self, model: PreTrainedModel, recorder: Recorder, new_cache: Callable[[], HookedCache]
    ) -> None:
        self.decoder = Decoder(model)
        self.recorder = recorder
        self._new_cache = new_cache
        self._checked_at = time.monotonic()

    @contextmanager
    def observed(self, batch: Batch) -> Iterator[HookedCache]:
        """Observe a batch that is run with the given cache; an exception discards it."""
        rows, columns = batch.input_ids.shape
        view = BatchView(shape=(rows, columns), lengths=batch.lengths, first=batch.first)
        self.recorder.begin_batch(view)
        yield self._new_cache()
        self.recorder.end_batch()

    def check(self, *, at_end: bool = False) -> bool:
        """Check the batches since the last check, on a GPU if it was long ago; tell whether it did.

        Raises:
            CalibrationError: an activation is NaN or inf; the message names site and sample.
        """
        now = time.monotonic()
        is_gpu = self.decoder.device.type != "cpu"
        # each look waits for the device; a checkpoint is written behind one
        if is_gpu and not at_end and now < self._checked_at + INTERVAL_S / 2:
            return False
        self._checked_at = now
        if (found := self.recorder.find_nonfinite()) is None:
            return True
        site, sample = found
        what = "the input of" if site.role is Role.INPUT else f"{site.role} of"
        raise CalibrationError(
            f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
            hint="float16 overflows at 65504: use --dtype bfloat16"
            if self.decoder.dtype is torch.float16
            else "look at the weights before it, the embedding included, and at the sample",
        )

    def fits(self, batch: Batch) -> bool:
        """Run a batch; False where it must be halved."""
        # The error holds the frames of the forward pass, and their tensors: memory is returned
        # after this function.
        try:
            with self.observed(batch) as cache:
                self.decoder.run(batch, cache)
        except OutOfMemoryInForward:
            if len(batch.lengths) == 1:
                raise
            return False
        return True


@contextmanager
def open_observer(
    prepared: PreparedModel, recorder: Recorder, observe: Observe
) -> Iterator[BatchObserver]:
    """Show the tensors of a model that `observe` names to a recorder while the context is open."""
    model, geometry, ignored = prepared.model, prepared.geometry, prepared.ignored
    config = model.config.get_text_config(decoder=True)
    attentions = geometry.owners()
    unseen = ignored if observe.kv else {each.module for each in attentions.values()}
    with open_hooks(
        model, geometry, recorder, query=observe.query, inputs=observe.inputs, ignored=ignored
    ):
        observer = BatchObserver(
            model, recorder, lambda: HookedCache(config, attentions, unseen, recorder)
        )
        has_experts = observe.inputs and any(each.num_experts for _, each in geometry.linears())
        try_kernels({observer.decoder.device, *gpus_of(model)}, has_experts=has_experts)
        yield observer


class WholePass:
    """Gathers the statistics of a model that is in memory whole.

    Attributes:
        device: the device of its embeddings.
        tensors: those that its linears are made from.
        weights: the statistics of weights, on the devices that hold them.
    """

    def __init__(
        self,
        prepared: PreparedModel,
        linears: Sequence[Linear],
        progress: Progress,
        journal: Journal | None,
    ) -> None:
        self.device = prepared.model.device
        names = {linear.weight_name for _, linear in prepared.geometry.linears()}
        self.tensors = prepared.weights.tensor_names(names)
        self.weights: dict[Site, SiteStats] = {}
        self._prepared = prepared
        self._linears = linears
        self._progress = progress
        self._journal = journal

    def observe_weights(self) -> None:
        """Begin to reduce the weights on their GPU, or reduce them on the CPU."""
        if not self._linears:
            return
        self._progress.stage("reading weights", len(self._linears))
        source, ignored = self._prepared.weights.reading_loaded(), self._prepared.ignored
        for site, stats in observe_weights(self._linears, source, ignored=ignored):
            self.weights[site] = stats
            self._progress.advance(1)

    def observe(
        self, observer: BatchObserver, batches: Sequence[Batch], back_offs: list[BackOff]
    ) -> dict[Site, SiteStats]:
        """Run batches behind the weights.

        A batch that does not fit into memory is halved, and so are all later ones; `back_offs`
        tells where.

        Raises:
            CalibrationError: an activation is NaN or inf (the message names layer and sample), or
                one sequence does not fit into memory.
        """
        self.observe_weights()
        num_tokens = sum(batch.num_tokens for batch in batches)
        self._progress.stage("calibrating", num_tokens, unit="tokens", batches=len(batches))
        recorder, journal = observer.recorder, self._journal
        waiting, most, has_run = deque(batches), sys.maxsize, False
        while waiting:
            batch = waiting.popleft()
            if len(batch.lengths) > most:
                waiting.extendleft(reversed(cut_into(batch, most)))
                continue
            if not observer.fits(batch):
                return_memory_of(observer.decoder.device)
                most = len(batch.lengths) // 2
                back_offs.append(BackOff(first=batch.first, batch_size=most))
                waiting.appendleft(batch)
                continue
            if not has_run:
                # The first batch allocates the statistics between its activations; later ones
                # do not.
                return_freed_memory()
                has_run = True
            self._progress.advance(batch.num_tokens)
            if observer.check(at_end=not waiting) and journal is not None:
                journal.save_if_due(recorder.sequences, recorder.stats)
        return recorder.stats()


class LayerPass:
    """Gathers the statistics of a streamed model; its attributes are those of `WholePass`."""

    def __init__(
        self,
        streamed: StreamedModel,
        linears: Sequence[Linear] | None,
        progress: Progress,
        journal: Journal | None,
        work: LayerWork | None,
    ) -> None:
        """Observe the weights of `linears`, and look for NaN in others of layers; None: in none."""
        self.device = streamed.device
        self.tensors = frozenset(name for part in streamed.parts for name in part.tensors)
        self.weights: dict[Site, SiteStats] = {}
        self._streamed = streamed
        self._num_layers = len(streamed.geometry.layers)
        self._linears = None if linears is None else {linear.module for linear in linears}
        self._progress = progress
        self._journal = journal
        self._work = work

    def observe_weights(self) -> None:
        """Read and observe the weights alone."""
        self._progress.stage("reading weights", self._num_layers, unit="layers")
        with self._streamed.layers(first=self._num_layers) as layers:
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
        size = max(len(batch.lengths) for batch in batches)
        while True:
            self._progress.stage("layer by layer", steps, unit="tokens", layers=self._num_layers)
            try:
                return self._walk(observer, batches)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            return_memory_of(self.device)
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
            self._progress.advance(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(streamed.layers(first=first)):
                index = layer.layer.index
                left = self._observe_weights(layer, will_be_placed=index >= first)
                if index < first:
                    continue
                with streamed.placed(layer):
                    self._reduce(left, layer.weights.reading_loaded())
                    for number, batch in enumerate(batches):
                        before = store.get(number, observer.decoder.device) if index else None
                        with observer.observed(batch) as cache:
                            checks = number == 0
                            after = steps.run_layer(index, batch, cache, before, checks=checks)
                        if index < last:
                            store.put(number, after)
                        self._progress.advance(batch.num_tokens)
                        observer.check(at_end=(index, number) == (last, len(batches) - 1))
                    if self._work is not None:
                        self._work.finish_layer(layer.layer)
                if journal is not None and index < last and journal.is_due_for_layer():
                    observer.check(at_end=True)
                    journal.save_layer(index, batches, store, observer.recorder.stats)
        earlier = {} if journal is None else journal.layer_sites
        return merge_sites([earlier, observer.recorder.stats()])

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
        self._reduce(linears, layer.weights)
        return ()

    def _reduce(self, linears: Sequence[Linear], weights: WeightSource) -> None:
        self.weights |= observe_weights(linears, weights, ignored=self._streamed.prepared.ignored)
