"""Run batches through a model, whole or one decoder layer at a time, and gather its statistics.

In a streamed model each layer's weights are read once, while the layer before runs; all batches run
through the layer, and its weights are dropped. Every site sees the same batches in the same order
as in a whole model, so the statistics are the same, bit for bit. The lm_head never runs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from fp8calib.calibration.allocator import return_freed_memory
from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.header import BackOff, Observe, StatsHeader
from fp8calib.calibration.hooks import HookedCache
from fp8calib.calibration.journal import INTERVAL_S, Journal
from fp8calib.calibration.kernel_trial import gpus_of
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.reductions import try_kernels
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.weight_stats import check_other_weights, observe_weights
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.data.sequences import Batch, DataPlan, Share, cut_into
from fp8calib.errors import CalibrationError
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import Linear, Role, Site

if TYPE_CHECKING:  # a model in memory needs none of it
    from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel, Streaming

_GPU_BATCH_TOKENS = 8192
"""About as many keep a GPU busy; the same on every GPU, so that shards and resumed runs agree."""


class TextEngine(Protocol):
    """An engine that loads the model itself, runs batches and observes them."""

    def describe(self) -> str:
        """Describe its version and how it runs, as the header of the statistics has it."""

    def observe(
        self, run: CalibrationRun, todo: Sequence[Batch]
    ) -> tuple[dict[Site, SiteStats], Mapping[Site, str]]:
        """Run batches; give the statistics, and the sites that it does not show, with the reason.

        The model of the run has no weights.
        """


@dataclass(slots=True, kw_only=True)
class CalibrationRun:
    """What a calibration observes, and how."""

    prepared: PreparedModel
    """Without weights where it is streamed, or an engine runs the text."""
    plan: DataPlan | None
    """None where only weights are observed."""
    checkpoint: Checkpoint
    header: StatsHeader
    observe: Observe
    batch_size: int
    progress: Progress
    streaming: Streaming | None = None
    """How the layers are read one by one; None for a model in memory."""
    shard: Share | None = None
    journal: Journal | None = None
    """What earlier runs have done; None for a run that cannot be resumed."""
    group: ProcessGroup = LONE
    recorder: Recorder | None = None
    """None: one that only records."""
    engine: TextEngine | None = None
    """What runs the text; None: transformers."""
    weights: dict[Site, SiteStats] = field(default_factory=dict)
    """The statistics of weights so far, on the devices that hold them."""
    back_offs: list[BackOff] = field(default_factory=list)
    """Where batches became smaller because memory ran out."""


def choose_batch_size(device: str, seq_len: int) -> int:
    """Choose how many sequences a batch has where the user does not."""
    return 1 if device == "cpu" else max(1, _GPU_BATCH_TOKENS // seq_len)


class BatchObserver:
    """Shows the forward passes of batches to a recorder."""

    def __init__(self, run: CalibrationRun, recorder: Recorder) -> None:
        self.decoder = Decoder(run.prepared.model)
        self.recorder = recorder
        self._attentions = run.prepared.geometry.owners()
        every = {attention.module for attention in self._attentions.values()}
        self._unseen = run.prepared.ignored if run.observe.kv else every
        linears = run.prepared.geometry.linears()
        has_experts = run.observe.inputs and any(linear.num_experts for _, linear in linears)
        try_kernels({self.decoder.device, *gpus_of(run.prepared.model)}, has_experts=has_experts)
        self._checked_at = time.monotonic()

    def begin(self, batch: Batch) -> HookedCache:
        """Begin to observe a batch, and give its cache; it counts after `recorder.end_batch`."""
        rows, columns = batch.input_ids.shape
        view = BatchView(shape=(rows, columns), lengths=batch.lengths, first=batch.first)
        self.recorder.begin_batch(view)
        return HookedCache(self.decoder.config, self._attentions, self._unseen, self.recorder)

    def check(self, *, at_end: bool = False) -> bool:
        """Refuse NaN and inf in the batches since the last look; on a GPU, look if it was long ago.

        Tells whether it looked.
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

    def return_memory(self) -> None:
        """Return the memory of a batch that did not fit; its exception must be out of scope."""
        if self.decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()


def run_whole(
    run: CalibrationRun,
    linears: Sequence[Linear],
    observer: BatchObserver | None,
    batches: Sequence[Batch],
) -> dict[Site, SiteStats]:
    """Observe weights of a model in memory, then run batches; without an observer run none.

    On a GPU the reductions of weights only begin. A batch that does not fit into memory is halved,
    and so are all later ones.
    """
    progress, journal = run.progress, run.journal
    if linears:
        progress.stage("reading weights", len(linears))
        source, ignored = run.prepared.weights.reading_loaded(), run.prepared.ignored
        for site, stats in observe_weights(linears, source, ignored=ignored):
            run.weights[site] = stats
            progress.advance(1)
    if observer is None:
        return {}
    num_tokens = sum(batch.num_tokens for batch in batches)
    progress.stage("calibrating", num_tokens, unit="tokens", batches=len(batches))
    recorder = observer.recorder
    waiting, most = deque(batches), sys.maxsize
    while waiting:
        batch = waiting.popleft()
        if len(batch.lengths) > most:
            waiting.extendleft(reversed(cut_into(batch, most)))
            continue
        try:
            observer.decoder.run(batch, observer.begin(batch))
            recorder.end_batch()
        except OutOfMemoryInForward:
            most = len(batch.lengths) // 2
            if not most:
                raise
        if most < len(batch.lengths):  # the error is gone, and with it the tensors of its frames
            observer.return_memory()
            run.back_offs.append(BackOff(first=batch.first, batch_size=most))
            waiting.appendleft(batch)
            continue
        if len(recorder.sequences) == 1:
            # The first batch allocates the statistics between its activations; later ones do not.
            return_freed_memory()
        progress.advance(batch.num_tokens)
        if observer.check(at_end=not waiting) and journal is not None:
            journal.save_if_due(recorder.sequences, recorder.stats)
    return recorder.stats()


class LayerPass:
    """Gathers the statistics of a streamed model."""

    def __init__(
        self, run: CalibrationRun, streamed: StreamedModel, linears: Sequence[Linear] | None
    ) -> None:
        """Observe the weights of `linears`, and look for NaN in others of layers; None: in none."""
        self._run = run
        self._streamed = streamed
        self._num_layers = len(streamed.geometry.layers)
        self._linears = None if linears is None else {linear.module for linear in linears}

    def observe_weights(self) -> None:
        """Read and observe the weights alone."""
        self._run.progress.stage("reading weights", self._num_layers, unit="layers")
        with self._streamed.layers(first=self._num_layers) as layers:
            for layer in layers:
                self._observe_on_cpu(layer, will_be_placed=False)
                self._run.progress.advance(1)

    def observe(self, observer: BatchObserver, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
        """Run batches through the model; when one does not fit into memory, restart with halves."""
        layers = self._num_layers
        steps = sum(batch.num_tokens for batch in batches) * layers
        size = max(len(batch.lengths) for batch in batches)
        while True:
            self._run.progress.stage("layer by layer", steps, unit="tokens", layers=layers)
            try:
                return self._walk(observer, batches)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            observer.return_memory()
            observer.recorder.forget()
            self._run.back_offs.append(BackOff(first=batches[0].first, batch_size=size))
            batches = [part for batch in batches for part in cut_into(batch, size)]

    def _walk(self, observer: BatchObserver, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
        """Run all batches through every layer in turn."""
        streamed, journal, progress = self._streamed, self._run.journal, self._run.progress
        recorder, first, last = observer.recorder, 0, self._num_layers - 1
        with ExitStack() as stack:
            store = stack.enter_context(streamed.open_hidden_states())
            if journal is not None:
                first = journal.load_layer(batches, store)
            steps = stack.enter_context(streamed.steps(observer.decoder, batches, store))
            progress.advance(first * sum(batch.num_tokens for batch in batches))
            for layer in stack.enter_context(streamed.layers(first=first)):
                index = layer.layer.index
                left = self._observe_on_cpu(layer, will_be_placed=index >= first)
                if index < first:
                    continue
                with streamed.placed(layer):
                    self._run.weights |= observe_weights(
                        left, layer.weights.reading_loaded(), ignored=streamed.prepared.ignored
                    )
                    for number, batch in enumerate(batches):
                        before = store.get(number, observer.decoder.device) if index else None
                        cache = observer.begin(batch)
                        after = steps.run_layer(index, batch, cache, before, checks=number == 0)
                        recorder.end_batch()
                        if index < last:
                            store.put(number, after)
                        progress.advance(batch.num_tokens)
                        observer.check(at_end=(index, number) == (last, len(batches) - 1))
                    recorder.finish_layer(layer.layer)
                if journal is not None and index < last and journal.is_due_for_layer():
                    observer.check(at_end=True)
                    journal.save_layer(index, batches, store, recorder.stats)
        earlier = {} if journal is None else journal.layer_sites
        return merge_sites([earlier, recorder.stats()])

    def _observe_on_cpu(self, layer: StreamedLayer, *, will_be_placed: bool) -> Sequence[Linear]:
        """Observe weights as they are read, and give those that are left for the GPU."""
        if self._linears is None:
            return ()
        linears = [each for each in layer.layer.linears if each.module in self._linears]
        read = layer.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
        stored = {TORCH_DTYPES[layer.held.tensors[name].dtype] for name in read}
        streamed = self._streamed
        is_gpu = will_be_placed and streamed.device.type == "cuda"
        if is_gpu and stored == {streamed.model.dtype}:
            return linears
        ignored = streamed.prepared.ignored
        self._run.weights |= observe_weights(linears, layer.weights, ignored=ignored)
        return ()
