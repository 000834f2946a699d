"""Run calibration data through a model, whole or layer by layer, and collect its statistics.

In a streamed model each layer's weights are read once, while the layer before runs; all batches run
through the layer, and its weights are dropped. Every site sees the same batches in the same order
as in a whole model, so the statistics are the same, bit for bit. The lm_head never runs.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from fp8calib.calibration import reductions
from fp8calib.calibration.batch_view import BatchView
from fp8calib.calibration.calibration_stats import RunStats, SiteStats, join_ranges, merge_sites
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.job import CalibrationJob
from fp8calib.calibration.journal import INTERVAL_S, Journal
from fp8calib.calibration.kernel_trial import gpus_of
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.stats_header import Skipped, StatsShard
from fp8calib.calibration.unquantized_tensors import hash_unquantized
from fp8calib.calibration.weight_stats import check_other_weights, observe_weights, settle_weights
from fp8calib.data.sequences import (
    Batch,
    Share,
    cut_into,
    drop_finished,
    find_distinct_tokens,
    sequence_ranges,
)
from fp8calib.errors import CalibrationError
from fp8calib.machine import PeakMemory, return_freed_memory
from fp8calib.model.geometry import Layer, Linear, Role, Site
from fp8calib.model.prepared import list_skipped
from fp8calib.model.weight_source import WeightSource

if TYPE_CHECKING:  # a model in memory needs none of it
    from fp8calib.calibration.streamed_model import StreamedModel


def run_calibration(
    job: CalibrationJob, journal: Journal | None = None
) -> tuple[RunStats, dict[str, Any]]:
    """Collect the statistics of a job; without a journal it cannot be resumed.

    Streamed or whole, they are the same, bit for bit. Of several processes only the first has all.

    Returns:
        The statistics, and what the run cost, as fields of a `CalibrateResult`.
    """
    started = time.monotonic()
    journal = journal or job.open_journal()
    with PeakMemory() as memory, job.group.peer_failures():
        run = _Run(job, journal)
        stats = run.collect()
        back_offs = job.group.gather(run.back_offs)
    duration_s = time.monotonic() - started
    sequences = () if job.plan is None else job.plan.sequences
    ranges = journal.sequences
    tokens = [len(each) for first, stop in ranges for each in sequences[first:stop]]
    counts = job.count()
    return stats, {
        **counts,
        "duration_s": duration_s,
        # without those that an interrupted run had finished
        "tokens_per_s": (counts["tokens"] - sum(tokens)) / duration_s,
        "memory": {**job.mode.as_json(), "peak_measured_bytes": memory.peak_bytes},
        "batch_back_off": tuple(each for ranks in back_offs for each in ranks),
        "resumed_sequences": len(tokens),
        "ranks": job.group.size,
    }


class _Run:
    """A job that runs.

    Attributes:
        back_offs: where batches became smaller because memory ran out: `first`, the first sequence,
            and `batch_size`, the size from there.
    """

    def __init__(self, job: CalibrationJob, journal: Journal) -> None:
        self.back_offs: list[dict[str, int]] = []
        self._job, self._journal, self._progress = job, journal, job.progress
        model, self._prepared = job.model, job.model.prepared
        if not (job.engine or job.mode.is_streamed):
            self._prepared = model.load(job.progress)
        self._weights: dict[Site, SiteStats] = {}  # on the devices that hold the weights
        self._linears: Sequence[Linear] = ()
        """Those whose weights this process observes."""
        if job.observe.weights:  # one process reads each
            every = [linear for _, linear in self._prepared.geometry.linears()]
            self._linears = job.group.share.take((job.shard or Share()).take(every))

    def collect(self) -> RunStats:
        """Observe weights and text."""
        job, prepared, checkpoint = self._job, self._prepared, self._job.model.checkpoint
        todo = job.group.share.take(drop_finished(job.batches, self._journal.sequences))
        unseen: Mapping[Site, str] = {}
        with ExitStack() as stack:
            streamed, device = None, prepared.model.device
            if job.mode.is_streamed and todo:
                # a model in memory needs none of it
                from fp8calib.calibration.streamed_model import open_streamed  # noqa: PLC0415

                tokens = find_distinct_tokens(todo)
                streamed = stack.enter_context(
                    open_streamed(prepared, tokens, job.mode, job.model.device)
                )
                device = streamed.device
            weights = {linear.weight_name for _, linear in prepared.geometry.linears()}
            read, is_first = prepared.weights.tensor_names(weights), job.group.is_first
            has_rest = is_first and job.observe.weights and (not job.shard or job.shard.index == 1)
            others = [name for name in checkpoint.tensors if has_rest and name not in read]

            def read_files() -> dict[str, str]:
                check_other_weights(checkpoint, others)
                return hash_unquantized(checkpoint.stored) if is_first else {}

            reading = Future[dict[str, str]]()
            if device.type == "cuda" and checkpoint.files:
                pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="read-files"))
                reading = pool.submit(read_files)
            else:  # the passes need the same cores
                reading.set_result(read_files())
            try:
                if streamed is not None:
                    sites = self._run_by_layer(streamed, todo)
                else:
                    sites = self._run_whole(() if job.engine else todo)
                if todo and job.observe_text is not None:
                    sites, unseen = job.observe_text(job, todo, self._journal)
            except CalibrationError:  # its cause may be NaN in a weight
                settle_weights(self._weights, prepared)
                reading.result()
                raise
            sites |= settle_weights(self._weights, prepared)
        sites = merge_sites([*job.group.gather(sites), self._journal.sites])
        return self._make_stats(sites, unseen, reading.result())

    def _make_stats(
        self,
        sites: Mapping[Site, SiteStats],
        unseen: Mapping[Site, str],
        unquantized: dict[str, str],
    ) -> RunStats:
        """Make the statistics of a run that has observed all that it should."""
        job, prepared = self._job, self._prepared
        for layer, attention in prepared.geometry.attentions():
            is_own = attention.producer is None and attention.module not in prepared.ignored
            is_due = job.plan is not None and job.observe.kv and job.group.is_first and is_own
            if is_due and attention.site(Role.K) not in sites:
                raise CalibrationError(
                    f"layer {layer.index} ({layer.mixer}) has a KV cache by its topology, but "
                    "nothing was written to it"
                )
        query, inputs = job.observe.query, job.observe.inputs
        skipped = list_skipped(prepared, sites, unseen, query=query, inputs=inputs)
        added = {
            "skipped": tuple(Skipped(site=site, why=why) for site, why in skipped),
            "unquantized": unquantized,
        }
        part = None
        if job.shard is not None and job.plan is not None:
            part = StatsShard(
                index=job.shard.index,
                count=job.shard.count,
                batch_size=job.batch_size,
                sequences=join_ranges(sequence_ranges(job.batches)),
            )
        return RunStats(header=job.header.model_copy(update=added), sites=sites, shard=part)

    # --- batches ----------------------------------------------------------------------------------

    def _open_hooks(self) -> AbstractContextManager[None]:
        """Open the hooks that show forward passes to the recorder."""
        prepared, job, observe = self._prepared, self._job, self._job.observe
        if job.make_recorder is None:
            self._recorder = Recorder(job.header.num_sequences)
        else:
            self._recorder = job.make_recorder(self._journal.folder)
        self._decoder = Decoder(prepared.model)
        attentions = prepared.geometry.owners()
        every = {attention.module for attention in attentions.values()}
        unseen = prepared.ignored if observe.kv else every
        self._open_cache = partial(
            HookedCache, self._decoder.config, attentions, unseen, self._recorder
        )
        linears = prepared.geometry.linears()
        has_experts = observe.inputs and any(linear.num_experts for _, linear in linears)
        # before the batches, as the host waits for a trial
        for device in {self._decoder.device, *gpus_of(prepared.model)}:
            for name in ("reduce_heads", "reduce_experts")[: 1 + has_experts]:
                reductions.has_kernel(name, device)
        self._checked_at = time.monotonic()
        return open_hooks(
            *(prepared.model, prepared.geometry, self._recorder),
            query=observe.query,
            inputs=observe.inputs,
            ignored=prepared.ignored,
        )

    def _begin(self, batch: Batch) -> HookedCache:
        """Begin to observe a batch, and give its cache; it counts after `end_batch`."""
        view = BatchView(batch.input_ids.shape, batch.lengths, batch.first)
        self._recorder.begin_batch(view)
        return self._open_cache()

    def _check(self, *, at_end: bool = False) -> bool:
        """Refuse NaN and inf in the batches since the last look; on a GPU, look if it was long ago.

        Tells whether it looked.
        """
        now = time.monotonic()
        is_gpu = self._decoder.device.type != "cpu"
        # each look waits for the device; a checkpoint is written behind one
        if is_gpu and not at_end and now < self._checked_at + INTERVAL_S / 2:
            return False
        self._checked_at = now
        if (found := self._recorder.find_nonfinite()) is None:
            return True
        site, sample = found
        what = "the input of" if site.role is Role.INPUT else f"{site.role} of"
        raise CalibrationError(
            f"NaN or inf in {what} {site.module} at sample {sample} (counting from 0)",
            hint="float16 overflows at 65504: use --dtype bfloat16"
            if self._decoder.dtype is torch.float16
            else "look at the weights before it, the embedding included, and at the sample",
        )

    def _back_off(self, first: int, size: int) -> None:
        """Return the memory of a batch that did not fit; its exception must be out of scope."""
        if self._decoder.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            return_freed_memory()
        self.back_offs.append({"first": first, "batch_size": size})

    # --- passes -----------------------------------------------------------------------------------

    def _run_whole(self, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
        """Observe weights of a model in memory, then run batches.

        On a GPU the reductions of weights only begin. A batch that does not fit into memory is
        halved, and so are all later ones.
        """
        if self._linears:
            self._progress.stage("reading weights", len(self._linears))
            source, ignored = self._prepared.weights.reading_loaded(), self._prepared.ignored
            for site, stats in observe_weights(self._linears, source, ignored=ignored):
                self._weights[site] = stats
                self._progress.advance(1)
        if not batches:
            return {}
        num_tokens = sum(batch.num_tokens for batch in batches)
        self._progress.stage("calibrating", num_tokens, unit="tokens")
        waiting, most = deque(batches), sys.maxsize
        with self._open_hooks():
            recorder = self._recorder
            while waiting:
                batch = waiting.popleft()
                if len(batch.lengths) > most:
                    waiting.extendleft(reversed(cut_into(batch, most)))
                    continue
                try:
                    self._decoder.run(batch, self._begin(batch))
                    recorder.end_batch()
                except OutOfMemoryInForward:
                    most = len(batch.lengths) // 2
                    if not most:
                        raise
                if most < len(batch.lengths):  # the error is gone, with the tensors of its frames
                    self._back_off(batch.first, most)
                    waiting.appendleft(batch)
                    continue
                if len(recorder.sequences) == 1:
                    # The first batch allocates statistics between its activations.
                    return_freed_memory()
                self._progress.advance(batch.num_tokens)
                if self._check(at_end=not waiting):
                    self._journal.save_if_due(recorder.sequences, recorder.stats)
        return recorder.stats()

    def _run_by_layer(
        self, streamed: StreamedModel, batches: Sequence[Batch]
    ) -> dict[Site, SiteStats]:
        """Run batches through a streamed model; if one does not fit, restart with halves.

        Weights are observed as layers are read.
        """
        num_layers = len(streamed.geometry.layers)
        steps = sum(batch.num_tokens for batch in batches) * num_layers
        size = max(len(batch.lengths) for batch in batches)
        while True:
            self._progress.stage("layer by layer", steps, unit="tokens", layers=num_layers)
            try:
                with self._open_hooks():
                    return self._walk(streamed, batches)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            self._back_off(batches[0].first, size)
            batches = [part for batch in batches for part in cut_into(batch, size)]

    def _walk(self, streamed: StreamedModel, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
        """Run all batches through every layer in turn."""
        journal, progress, recorder = self._journal, self._progress, self._recorder
        store, last = streamed.open_hidden_states(), len(streamed.parts) - 1
        first, is_gpu = journal.load_layer(batches, store), streamed.device.type == "cuda"

        wanted = {linear.module for linear in self._linears}

        def observe(layer: Layer, source: WeightSource) -> None:
            own = [linear for linear in layer.linears if linear.module in wanted]
            self._weights |= observe_weights(own, source, ignored=self._prepared.ignored)

        for layer in streamed.geometry.layers[:first]:  # an earlier run has done the rest
            observe(layer, self._prepared.weights)
        with ExitStack() as stack:
            steps = stack.enter_context(streamed.steps(self._decoder, batches, store))
            progress.advance(first * sum(batch.num_tokens for batch in batches))
            for read in stack.enter_context(streamed.layers(first=first)):
                index = read.layer.index
                if not is_gpu:  # as stored: the model may cast them
                    observe(read.layer, read.weights)
                with streamed.placed(read):
                    if is_gpu:
                        observe(read.layer, read.weights.reading_loaded())
                    for number, batch in enumerate(batches):
                        before = store.get(number, self._decoder.device) if index else None
                        cache = self._begin(batch)
                        after = steps.run_layer(index, batch, cache, before, checks=number == 0)
                        recorder.end_batch()
                        if index < last:
                            store.put(number, after)
                        progress.advance(batch.num_tokens)
                        self._check(at_end=(index, number) == (last, len(batches) - 1))
                    recorder.finish_layer(read.layer)
                if index < last and journal.is_due():
                    self._check(at_end=True)
                    journal.save_layer(index, batches, store, recorder.stats)
        return merge_sites([journal.layer_sites, recorder.stats()])
