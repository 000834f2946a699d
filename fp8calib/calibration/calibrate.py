"""Run calibration data through a model and collect its statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager

import torch

from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS
from fp8calib.calibration.calibration_stats import CalibrationStats, join_ranges
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.header import Observe, Skipped, StatsHeader, StatsShard
from fp8calib.calibration.hooks import open_hooks
from fp8calib.calibration.passes import (
    BatchObserver,
    CalibrationRun,
    LayerPass,
    TextEngine,
    run_whole,
)
from fp8calib.calibration.recorder import Recorder
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.unquantized_tensors import hash_unquantized
from fp8calib.calibration.weight_stats import check_other_weights, settle_weights
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import (
    Batch,
    DataPlan,
    drop_finished,
    find_distinct_tokens,
    select_batches,
    sequence_ranges,
)
from fp8calib.errors import CalibrationError
from fp8calib.model.load import ModelSource
from fp8calib.model.prepared import PreparedModel, list_skipped
from fp8calib.model.shapes import Linear, Role, Site


def collect_stats(run: CalibrationRun) -> CalibrationStats:
    """Collect the statistics of a run; of several processes only the first returns all.

    Streamed or whole, they are the same, bit for bit.

    Raises:
        UsageError: there are fewer batches than shards.
        ModelError: a weight is NaN or inf.
        CalibrationError: an activation is NaN or inf, or a required site was not observed.
    """
    prepared, plan, observe, shard = run.prepared, run.plan, run.observe, run.shard
    chosen = [] if plan is None else select_batches(plan, run.batch_size, shard)
    done = () if run.journal is None else run.journal.sequences
    todo = list(run.group.share.take(drop_finished(chosen, done)))
    linears: Sequence[Linear] | None = None
    if observe.weights:  # one process reads each
        linears = [linear for _, linear in prepared.geometry.linears()]
        linears = run.group.share.take(linears if shard is None else shard.take(linears))
    sites, unseen, unquantized = _observe(run, linears, todo)
    earlier = {} if run.journal is None else run.journal.sites
    sites = merge_sites([*run.group.gather(sites), earlier])
    for layer, attention in prepared.geometry.attentions():
        is_own = attention.producer is None and attention.module not in prepared.ignored
        is_due = plan is not None and observe.kv and run.group.is_first and is_own
        if is_due and attention.site(Role.K) not in sites:
            raise CalibrationError(
                f"layer {layer.index} ({layer.mixer}) has a KV cache by its topology, but "
                "nothing was written to it"
            )
    skipped = list_skipped(prepared, sites, unseen, query=observe.query, inputs=observe.inputs)
    added = {
        "skipped": tuple(Skipped(site=site, why=why) for site, why in skipped),
        "unquantized": unquantized,
    }
    part = None
    if shard is not None and plan is not None:
        part = StatsShard(
            index=shard.index,
            count=shard.count,
            batch_size=run.batch_size,
            sequences=join_ranges(sequence_ranges(chosen)),
        )
    return CalibrationStats(header=run.header.model_copy(update=added), sites=sites, shard=part)


def _observe(
    run: CalibrationRun, linears: Sequence[Linear] | None, todo: Sequence[Batch]
) -> tuple[dict[Site, SiteStats], Mapping[Site, str], dict[str, str]]:
    """Observe weights and batches of this process.

    Returns:
        The statistics, the sites that an engine does not show, and hashes of tensors.
    """
    prepared, checkpoint, observe = run.prepared, run.checkpoint, run.observe
    sites: dict[Site, SiteStats] = {}
    unseen: Mapping[Site, str] = {}
    with ExitStack() as stack:
        layers = None
        if run.streaming is None:
            device = prepared.model.device
            weights = {linear.weight_name for _, linear in prepared.geometry.linears()}
            read = prepared.weights.tensor_names(weights)
        else:
            # a model in memory needs none of it
            from fp8calib.calibration.streamed_model import open_streamed  # noqa: PLC0415

            tokens = find_distinct_tokens(todo)
            streamed = stack.enter_context(
                open_streamed(prepared, checkpoint, tokens, run.streaming)
            )
            layers, device = LayerPass(run, streamed, linears), streamed.device
            read = frozenset(name for part in streamed.parts for name in part.tensors)
        has_rest = linears is not None and run.group.is_first
        has_rest &= run.shard is None or run.shard.index == 1
        names = [name for name in checkpoint.tensors if has_rest and name not in read]
        find_hashes = stack.enter_context(
            _reading_files(checkpoint, names, device, is_hashed=run.group.is_first)
        )
        try:
            observer = None
            if todo and run.engine is None:
                recorder = run.recorder or Recorder(run.header.num_sequences)
                hooks = open_hooks(
                    *(prepared.model, prepared.geometry, recorder),
                    query=observe.query,
                    inputs=observe.inputs,
                    ignored=prepared.ignored,
                )
                stack.enter_context(hooks)
                observer = BatchObserver(run, recorder)
            if layers is None:
                sites = run_whole(run, linears or (), observer, todo)
            elif observer is None:
                layers.observe_weights()
            else:
                sites = layers.observe(observer, todo)
            if todo and run.engine is not None:
                sites, unseen = run.engine.observe(run, todo)
        except CalibrationError:
            # NaN in a weight is the cause of that in an activation
            settle_weights(run.weights, prepared)
            find_hashes()
            raise
        return sites | settle_weights(run.weights, prepared), unseen, find_hashes()


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


@contextmanager
def _reading_files(
    checkpoint: Checkpoint, names: Sequence[str], device: torch.device, *, is_hashed: bool
) -> Iterator[Callable[[], dict[str, str]]]:
    """Look for NaN in tensors, and yield a function that waits for the hashes of the header.

    On a GPU a thread does this while the context is open. It is done at once if the passes need the
    same cores, or if the tensors are not in files.
    """

    def read() -> dict[str, str]:
        check_other_weights(checkpoint, names)
        return hash_unquantized(checkpoint.stored) if is_hashed else {}

    if device.type != "cuda" or not checkpoint.files:
        hashes = read()
        yield lambda: hashes
        return
    with ThreadPoolExecutor(1, thread_name_prefix="read-files") as pool:
        reading = pool.submit(read)
        yield reading.result
