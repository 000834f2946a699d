"""Run calibration data through a model and collect its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch, DataPlan, find_distinct_tokens
from fp8calib.data.shares import Share, select_batches, sequence_ranges
from fp8calib.errors import CalibrationError
from fp8calib.geometry.sites import Role, Site
from fp8calib.machine.progress import Progress
from fp8calib.model.load import ModelSource
from fp8calib.model.prepared import PreparedModel, list_skipped
from fp8calib.model.weight_stats import check_other_weights, observe_weights
from fp8calib.observe.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS
from fp8calib.observe.calibration_hooks import open_calibration_hooks
from fp8calib.observe.recorder import Recorder
from fp8calib.recipe import Recipe
from fp8calib.run.forward.observed_batches import BatchObserver
from fp8calib.run.forward.whole import run_whole
from fp8calib.run.resume.journal import Journal
from fp8calib.run.resume.work_share import WHOLE, WorkShare
from fp8calib.run.streaming.layer_observer import LayerObserver, LayerWork
from fp8calib.run.streaming.model import Streaming, open_streamed
from fp8calib.run.text_engine import TextEngine
from fp8calib.stats.calibration_stats import CalibrationStats, StatsHeader, StatsShard, join_ranges
from fp8calib.stats.fingerprint import fingerprint_model, versions
from fp8calib.stats.statistic import SiteStats
from fp8calib.stats.unquantized_tensors import hash_unquantized


def calibrate(
    prepared: PreparedModel,
    plan: DataPlan | None,
    source: ModelSource,
    checkpoint: Checkpoint,
    *,
    recipe: Recipe,
    progress: Progress,
    streaming: Streaming | None = None,
    share: WorkShare = WHOLE,
    work: LayerWork | None = None,
    engine: TextEngine | None = None,
) -> CalibrationStats:
    """Collect the statistics that `recipe` asks for; `plan` is None if it asks for weights only.

    With `streaming` the model has no weights yet: those of each layer are read once, and the
    statistics are the same, bit for bit. Of several processes only the first returns them all.
    `work` also gets the inputs of each layer, and needs a streamed model. `engine` loads
    the model and runs the text itself; `prepared` then has no weights.

    Raises:
        UsageError: there are fewer batches than shards.
        ModelError: a weight is NaN or inf.
        CalibrationError: an activation is NaN or inf, or a required site was not observed.
    """
    todo = None if plan is None else share.batches(plan, recipe.data.batch_size)
    num_sequences = 0 if plan is None else len(plan.sequences)
    sites: dict[Site, SiteStats] = {}
    unseen: Mapping[Site, str] = {}
    if streaming is not None:
        sites |= _layer_by_layer(
            prepared, todo, checkpoint, recipe, progress, streaming, share, work, num_sequences
        )
    else:
        if recipe.observe.weights:
            sites |= _weights(prepared, checkpoint, progress, share)
        if todo and engine is None:
            sites |= _activations(prepared, todo, recipe, progress, share, num_sequences)
        elif todo and engine is not None:
            found, unseen = engine.observe(
                prepared,
                checkpoint,
                todo,
                recipe,
                num_sequences=num_sequences,
                progress=progress,
                share=share,
            )
            sites |= found
    sites = share.join(sites)
    if plan is not None and recipe.observe.kv and share.is_first:
        _require_kv(prepared, sites)
    header = (
        make_header(prepared, plan, source, checkpoint, recipe, engine=engine)
        if share.journal is None
        else share.journal.header
    )
    kept = hash_unquantized(checkpoint.stored) if share.is_first else {}
    skipped = tuple(list_skipped(prepared, recipe, sites, unseen))
    return CalibrationStats(
        header=header.model_copy(update={"skipped": skipped, "unquantized": kept}),
        sites=sites,
        text_hashes=text_hashes_of(plan),
        shard=_make_shard(share.shard, plan, recipe.data.batch_size),
    )


def make_header(
    prepared: PreparedModel,
    plan: DataPlan | None,
    source: ModelSource,
    checkpoint: Checkpoint,
    recipe: Recipe,
    *,
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
        recipe_name=recipe.name,
        recipe_hash=recipe.observation_hash,
        compute_dtype=compute_dtype or str(prepared.model.dtype).removeprefix("torch."),
        histogram_sequences=HISTOGRAM_SEQUENCES,
        input_histogram_tokens=INPUT_HISTOGRAM_TOKENS,
        skipped=(),
        versions=versions(plan.tokens_by_modality if plan else ()),
        measured_quantized=checkpoint.form,
        engine="" if engine is None else engine.describe(),
        modality_tokens=plan.tokens_by_modality if plan else {},
    )


def text_hashes_of(plan: DataPlan | None) -> torch.Tensor:
    """Give the hashes of a run's text; an empty tensor without a text."""
    return torch.zeros(0, dtype=torch.int64) if plan is None else plan.text.hashes


def _make_shard(shard: Share | None, plan: DataPlan | None, batch_size: int) -> StatsShard | None:
    if shard is None or plan is None:
        return None
    return StatsShard(
        index=shard.index,
        count=shard.count,
        batch_size=batch_size,
        sequences=join_ranges(sequence_ranges(select_batches(plan, batch_size, shard))),
    )


def _weights(
    prepared: PreparedModel, checkpoint: Checkpoint, progress: Progress, share: WorkShare
) -> dict[Site, SiteStats]:
    linears = [linear for _, linear in prepared.geometry.linears()]
    chosen = share.weights(linears)
    progress.stage("reading weights", len(chosen))
    started = time.monotonic()
    found: dict[Site, SiteStats] = {}
    for site, stats in observe_weights(chosen, prepared.weights, ignored=prepared.ignored):
        found[site] = stats
        progress.advance(1)
    if share.reads_other_weights:
        read = prepared.weights.tensor_names({linear.weight_name for linear in linears})
        check_other_weights(checkpoint, [name for name in checkpoint.tensors if name not in read])
    if share.journal is not None:
        share.journal.save_weights(found, duration_s=time.monotonic() - started)
    return found


def _layer_by_layer(
    prepared: PreparedModel,
    todo: Sequence[Batch] | None,
    checkpoint: Checkpoint,
    recipe: Recipe,
    progress: Progress,
    streaming: Streaming,
    share: WorkShare,
    work: LayerWork | None,
    num_sequences: int,
) -> dict[Site, SiteStats]:
    num_layers = len(prepared.geometry.layers)
    tokens = find_distinct_tokens(todo or ())
    with open_streamed(prepared, checkpoint, tokens, streaming) as streamed:
        linears = share.weights([linear for _, linear in prepared.geometry.linears()])
        observer = LayerObserver(
            streamed, recipe.observe, linears=linears, num_sequences=num_sequences, work=work
        )
        if not todo:
            progress.stage("reading weights", num_layers, unit="layers")
            return observer.observe_weights(progress.advance)
        num_tokens = sum(batch.num_tokens for batch in todo)
        progress.stage("layer by layer", num_tokens * num_layers, unit="tokens", layers=num_layers)
        return observer.observe(
            todo, progress.advance, share.journal, on_back_off=share.back_offs.append
        )


def _activations(
    prepared: PreparedModel,
    todo: Sequence[Batch],
    recipe: Recipe,
    progress: Progress,
    share: WorkShare,
    num_sequences: int,
) -> dict[Site, SiteStats]:
    recorder = Recorder(num_sequences)
    num_tokens = sum(batch.num_tokens for batch in todo)
    progress.stage("calibrating", num_tokens, unit="tokens", batches=len(todo))
    with (
        open_calibration_hooks(
            prepared.model,
            prepared.geometry,
            recorder,
            recipe.observe,
            ignored=prepared.ignored,
        ) as new_cache,
        _checkpoints(recorder, share.journal) as on_checked,
    ):
        run_whole(
            BatchObserver(prepared.model, recorder, new_cache),
            todo,
            progress.advance,
            on_checked=on_checked,
            on_back_off=share.back_offs.append,
        )
    return recorder.stats()


@contextmanager
def _checkpoints(recorder: Recorder, journal: Journal | None) -> Iterator[Callable[[], None]]:
    """Save a recorder's statistics at intervals, at the end, and on an interruption."""
    if journal is None:
        yield lambda: None
        return
    try:
        yield lambda: journal.save_if_due(recorder)
    except KeyboardInterrupt:
        journal.save_interrupted(recorder)
        raise
    journal.save_final(recorder)


def _require_kv(prepared: PreparedModel, sites: Mapping[Site, SiteStats]) -> None:
    for layer, attention in prepared.geometry.attentions():
        is_own = attention.producer is None and attention.module not in prepared.ignored
        if is_own and attention.site(Role.K) not in sites:
            raise CalibrationError(
                f"layer {layer.index} ({layer.mixer}) has a KV cache by its topology, but "
                "nothing was written to it"
            )
