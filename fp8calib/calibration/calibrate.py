"""Run calibration data through a model, whole or layer by layer, and collect its statistics.

In a streamed model each layer's weights are read once, while the layer before runs; all batches run
through the layer, and its weights are dropped. Every site sees the same batches in the same order
as in a whole model, so the statistics are the same, bit for bit. The lm_head never runs.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from fp8calib.calibration.allocator import return_freed_memory
from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS, BatchView
from fp8calib.calibration.calibration_stats import (
    RunStats,
    SiteStats,
    join_ranges,
    merge_sites,
)
from fp8calib.calibration.decoder import Decoder, OutOfMemoryInForward
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.hooks import HookedCache, open_hooks
from fp8calib.calibration.journal import INTERVAL_S, Journal
from fp8calib.calibration.memory_plan import MemoryPlan
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.reductions import gpus_of, try_kernels
from fp8calib.calibration.stats_header import BackOff, Observe, Skipped, StatsHeader, StatsShard
from fp8calib.calibration.unquantized_tensors import hash_unquantized
from fp8calib.calibration.weight_stats import (
    check_other_weights,
    observe_weights,
    settle_weights,
)
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.data.sequences import (
    Batch,
    DataPlan,
    Share,
    cut_into,
    drop_finished,
    find_distinct_tokens,
    select_batches,
    sequence_ranges,
)
from fp8calib.errors import CalibrationError
from fp8calib.model.geometry import Linear, Role, Site
from fp8calib.model.load import ModelSource
from fp8calib.model.prepared import PreparedModel, list_skipped

if TYPE_CHECKING:  # a model in memory needs none of it
    from fp8calib.calibration.streamed_model import StreamedLayer, StreamedModel

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
    mode: MemoryPlan = field(default_factory=MemoryPlan)
    device: str = "cpu"
    """Where a streamed model computes."""
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
    linears: Sequence[Linear] | None = None
    """Those whose weights this process observes, set by `collect_stats`; None: no weights."""
    back_offs: list[BackOff] = field(default_factory=list)
    """Where batches became smaller because memory ran out."""


def choose_batch_size(device: str, seq_len: int) -> int:
    """Choose how many sequences a batch has where the user does not."""
    return 1 if device == "cpu" else max(1, _GPU_BATCH_TOKENS // seq_len)


def make_header(
    prepared: PreparedModel,
    plan: DataPlan | None,
    source: ModelSource,
    checkpoint: Checkpoint,
    *,
    observe: Observe,
    recipe_name: str,
    compute_dtype: str | None = None,
    engine: TextEngine | None = None,
) -> StatsHeader:
    """Make the header of a run's statistics; `calibrate` adds skipped sites and hashes of tensors.

    `prepared` may be without weights. `compute_dtype` is the dtype that the model computes in; None
    means the dtype of `prepared`.
    """
    return StatsHeader(
        geometry=prepared.geometry,
        model_fingerprint=fingerprint_model(source.raw_config, checkpoint.stored),
        data_fingerprint=plan.fingerprint if plan else "",
        data_sources=plan.sources if plan else (),
        num_sequences=len(plan.sequences) if plan else 0,
        num_tokens=plan.num_tokens if plan else 0,
        recipe_name=recipe_name,
        recipe_hash=hashlib.sha256(observe.model_dump_json().encode()).hexdigest(),
        compute_dtype=compute_dtype or str(prepared.model.dtype).removeprefix("torch."),
        histogram_sequences=HISTOGRAM_SEQUENCES,
        input_histogram_tokens=INPUT_HISTOGRAM_TOKENS,
        skipped=(),
        versions=versions(plan.tokens_by_modality if plan else ()),
        measured_quantized=checkpoint.form,
        engine="" if engine is None else engine.describe(),
        text_start=plan.start if plan else "",
        modality_tokens=plan.tokens_by_modality if plan else {},
    )


def collect_stats(run: CalibrationRun) -> RunStats:
    """Collect the statistics of a run; of several processes only the first returns all.

    Streamed or whole, they are the same, bit for bit.
    """
    prepared, shard, group = run.prepared, run.shard, run.group
    chosen = [] if run.plan is None else select_batches(run.plan, run.batch_size, shard)
    done = () if run.journal is None else run.journal.sequences
    todo = list(group.share.take(drop_finished(chosen, done) if done else chosen))
    if run.observe.weights:  # one process reads each
        every = [linear for _, linear in prepared.geometry.linears()]
        run.linears = group.share.take(every if shard is None else shard.take(every))
    sites: dict[Site, SiteStats] = {}
    unseen: Mapping[Site, str] = {}
    failure: CalibrationError | None = None
    with ExitStack() as stack:
        streamed, device = None, prepared.model.device
        if not run.mode.is_streamed:
            weights = {linear.weight_name for _, linear in prepared.geometry.linears()}
            read = prepared.weights.tensor_names(weights)
        else:
            # a model in memory needs none of it
            from fp8calib.calibration.streamed_model import open_streamed  # noqa: PLC0415

            tokens = find_distinct_tokens(todo)
            streamed = stack.enter_context(
                open_streamed(prepared, run.checkpoint, tokens, run.mode, run.device)
            )
            device = streamed.device
            read = frozenset(name for part in streamed.parts for name in part.tensors)
        has_rest = run.linears is not None and group.is_first and (not shard or shard.index == 1)
        others = [name for name in run.checkpoint.tensors if has_rest and name not in read]

        def read_files() -> dict[str, str]:
            check_other_weights(run.checkpoint, others)
            return hash_unquantized(run.checkpoint.stored) if group.is_first else {}

        unquantized, reading = {}, None
        if device.type == "cuda" and run.checkpoint.files:
            pool = stack.enter_context(ThreadPoolExecutor(1, thread_name_prefix="read-files"))
            reading = pool.submit(read_files)
        else:  # the passes need the same cores
            unquantized = read_files()
        try:
            if streamed is not None:
                sites = run_by_layer(run, streamed, todo)
            else:
                sites = run_whole(run, todo if run.engine is None else ())
            if todo and run.engine is not None:
                sites, unseen = run.engine.observe(run, todo)
        except CalibrationError as error:
            failure = error
        # NaN in a weight is the cause of that in an activation
        sites = sites | settle_weights(run.weights, prepared)
        unquantized = unquantized if reading is None else reading.result()
        if failure is not None:
            raise failure
    earlier = {} if run.journal is None else run.journal.sites
    return _make_stats(
        run, chosen, merge_sites([*group.gather(sites), earlier]), unseen, unquantized
    )


def _make_stats(
    run: CalibrationRun,
    chosen: Sequence[Batch],
    sites: Mapping[Site, SiteStats],
    unseen: Mapping[Site, str],
    unquantized: dict[str, str],
) -> RunStats:
    """Make the statistics of a run that has observed all that it should."""
    prepared, shard = run.prepared, run.shard
    for layer, attention in prepared.geometry.attentions():
        is_own = attention.producer is None and attention.module not in prepared.ignored
        is_due = run.plan is not None and run.observe.kv and run.group.is_first and is_own
        if is_due and attention.site(Role.K) not in sites:
            raise CalibrationError(
                f"layer {layer.index} ({layer.mixer}) has a KV cache by its topology, but "
                "nothing was written to it"
            )
    query, inputs = run.observe.query, run.observe.inputs
    skipped = list_skipped(prepared, sites, unseen, query=query, inputs=inputs)
    added = {
        "skipped": tuple(Skipped(site=site, why=why) for site, why in skipped),
        "unquantized": unquantized,
    }
    part = None
    if shard is not None and run.plan is not None:
        part = StatsShard(
            index=shard.index,
            count=shard.count,
            batch_size=run.batch_size,
            sequences=join_ranges(sequence_ranges(chosen)),
        )
    return RunStats(header=run.header.model_copy(update=added), sites=sites, shard=part)


# --- passes ---------------------------------------------------------------------------------------


class BatchObserver:
    """Shows the forward passes of batches to a recorder; its hooks are open in the context."""

    def __init__(self, run: CalibrationRun) -> None:
        prepared, observe = run.prepared, run.observe
        self.decoder = Decoder(prepared.model)
        self.recorder = run.recorder or Recorder(run.header.num_sequences)
        self._attentions = prepared.geometry.owners()
        every = {attention.module for attention in self._attentions.values()}
        self._unseen = prepared.ignored if observe.kv else every
        linears = prepared.geometry.linears()
        has_experts = observe.inputs and any(linear.num_experts for _, linear in linears)
        try_kernels({self.decoder.device, *gpus_of(prepared.model)}, has_experts=has_experts)
        self._checked_at = time.monotonic()
        self.hooks = open_hooks(
            *(prepared.model, prepared.geometry, self.recorder),
            query=observe.query,
            inputs=observe.inputs,
            ignored=prepared.ignored,
        )

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


def run_whole(run: CalibrationRun, batches: Sequence[Batch]) -> dict[Site, SiteStats]:
    """Observe weights of a model in memory, then run batches.

    On a GPU the reductions of weights only begin. A batch that does not fit into memory is halved,
    and so are all later ones.
    """
    progress, journal = run.progress, run.journal
    if run.linears:
        progress.stage("reading weights", len(run.linears))
        source, ignored = run.prepared.weights.reading_loaded(), run.prepared.ignored
        for site, stats in observe_weights(run.linears, source, ignored=ignored):
            run.weights[site] = stats
            progress.advance(1)
    if not batches:
        return {}
    num_tokens = sum(batch.num_tokens for batch in batches)
    progress.stage("calibrating", num_tokens, unit="tokens", batches=len(batches))
    observer = BatchObserver(run)
    recorder = observer.recorder
    waiting, most = deque(batches), sys.maxsize
    with observer.hooks:
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
            if most < len(batch.lengths):  # the error is gone, with the tensors of its frames
                observer.return_memory()
                run.back_offs.append(BackOff(first=batch.first, batch_size=most))
                waiting.appendleft(batch)
                continue
            if len(recorder.sequences) == 1:
                # The first batch allocates statistics between its activations; later ones do not.
                return_freed_memory()
            progress.advance(batch.num_tokens)
            if observer.check(at_end=not waiting) and journal is not None:
                journal.save_if_due(recorder.sequences, recorder.stats)
    return recorder.stats()


def run_by_layer(
    run: CalibrationRun, streamed: StreamedModel, batches: Sequence[Batch]
) -> dict[Site, SiteStats]:
    """Run batches through a streamed model; when one does not fit into memory, restart with halves.

    Weights are observed as layers are read.
    """
    num_layers = len(streamed.geometry.layers)
    if not batches:
        run.progress.stage("reading weights", num_layers, unit="layers")
        with streamed.layers(first=num_layers) as layers:
            for layer in layers:
                _observe_read(run, streamed, layer, will_be_placed=False)
                run.progress.advance(1)
        return {}
    observer = BatchObserver(run)
    steps = sum(batch.num_tokens for batch in batches) * num_layers
    size = max(len(batch.lengths) for batch in batches)
    with observer.hooks:
        while True:
            run.progress.stage("layer by layer", steps, unit="tokens", layers=num_layers)
            try:
                return _walk(run, streamed, observer, batches)
            except OutOfMemoryInForward:
                size //= 2
                if not size:
                    raise
            observer.return_memory()
            observer.recorder.forget()
            run.back_offs.append(BackOff(first=batches[0].first, batch_size=size))
            batches = [part for batch in batches for part in cut_into(batch, size)]


def _walk(
    run: CalibrationRun,
    streamed: StreamedModel,
    observer: BatchObserver,
    batches: Sequence[Batch],
) -> dict[Site, SiteStats]:
    """Run all batches through every layer in turn."""
    journal, progress, recorder = run.journal, run.progress, observer.recorder
    first, last = 0, len(streamed.geometry.layers) - 1
    store = streamed.open_hidden_states()
    if journal is not None:
        first = journal.load_layer(batches, store)
    with ExitStack() as stack:
        steps = stack.enter_context(streamed.steps(observer.decoder, batches, store))
        progress.advance(first * sum(batch.num_tokens for batch in batches))
        for layer in stack.enter_context(streamed.layers(first=first)):
            index = layer.layer.index
            left = _observe_read(run, streamed, layer, will_be_placed=index >= first)
            if index < first:
                continue
            with streamed.placed(layer):
                loaded = layer.weights.reading_loaded()
                run.weights |= observe_weights(left, loaded, ignored=run.prepared.ignored)
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


def _observe_read(
    run: CalibrationRun, streamed: StreamedModel, layer: StreamedLayer, *, will_be_placed: bool
) -> Sequence[Linear]:
    """Observe the weights of a layer as they were read, and give those left for the GPU."""
    if run.linears is None:
        return ()
    wanted = {linear.module for linear in run.linears}
    own = [linear for linear in layer.layer.linears if linear.module in wanted]
    read = layer.weights.tensor_names({linear.weight_name for linear in own})
    check_other_weights(layer.held, [name for name in layer.part.tensors if name not in read])
    stored = {TORCH_DTYPES[layer.held.tensors[name].dtype] for name in read}
    is_gpu = will_be_placed and streamed.device.type == "cuda"
    if is_gpu and stored == {streamed.model.dtype}:
        return own
    run.weights |= observe_weights(own, layer.weights, ignored=run.prepared.ignored)
    return ()
