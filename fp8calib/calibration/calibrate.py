"""Run calibration data through a model and collect its statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Protocol

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats, join_ranges
from fp8calib.calibration.fingerprint import fingerprint_model, versions
from fp8calib.calibration.header import BackOff, Skipped, StatsHeader, StatsShard
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.observe import Observe
from fp8calib.calibration.passes import LayerPass, WholePass, open_observer
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.calibration.progress import Progress
from fp8calib.calibration.recorder import LayerWork, Recorder
from fp8calib.calibration.reductions import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS
from fp8calib.calibration.statistic import SiteStats, merge_sites
from fp8calib.calibration.streamed_model import Streaming, open_streamed
from fp8calib.calibration.unquantized_tensors import hash_unquantized
from fp8calib.calibration.weight_stats import check_other_weights, settle_weights
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.data.sequences import Batch, DataPlan, find_distinct_tokens
from fp8calib.data.shares import Share, drop_finished, select_batches, sequence_ranges
from fp8calib.errors import CalibrationError
from fp8calib.model.load import ModelSource
from fp8calib.model.prepared import PreparedModel, list_skipped
from fp8calib.model.shapes import Linear, Role, Site


class TextEngine(Protocol):
    """An engine that loads the model itself, runs batches and observes them."""

    def describe(self) -> str:
        """Describe its version and how it runs, as the header of the statistics has it."""

    def observe(
        self,
        prepared: PreparedModel,
        checkpoint: Checkpoint,
        todo: Sequence[Batch],
        observe: Observe,
        *,
        num_sequences: int,
        progress: Progress,
        journal: Journal | None,
    ) -> tuple[dict[Site, SiteStats], Mapping[Site, str]]:
        """Run batches; give the statistics, and the sites that it does not show, with the reason.

        The whole run has `num_sequences`; `prepared` has no weights.
        """


def collect_stats(
    prepared: PreparedModel,
    plan: DataPlan | None,
    checkpoint: Checkpoint,
    header: StatsHeader,
    *,
    observe: Observe,
    batch_size: int,
    progress: Progress,
    streaming: Streaming | None = None,
    shard: Share | None = None,
    journal: Journal | None = None,
    group: ProcessGroup = LONE,
    back_offs: list[BackOff] | None = None,
    work: LayerWork | None = None,
    engine: TextEngine | None = None,
) -> CalibrationStats:
    """Collect the statistics that `observe` names; `plan` is None if it names weights only.

    With `streaming` the model has no weights yet: those of each layer are read once, and the
    statistics are the same, bit for bit. `journal` has what earlier runs have done. Of several
    processes only the first returns all statistics. `back_offs` is filled: where batches became
    smaller because memory ran out. `work` also gets the inputs of each layer, and needs a streamed
    model. `engine` loads the model and runs the text itself; `prepared` then has no weights.

    Raises:
        UsageError: there are fewer batches than shards.
        ModelError: a weight is NaN or inf.
        CalibrationError: an activation is NaN or inf, or a required site was not observed.
    """
    back_offs = [] if back_offs is None else back_offs
    chosen = [] if plan is None else select_batches(plan, batch_size, shard)
    done = () if journal is None else journal.sequences
    todo = list(group.share_of(drop_finished(chosen, done)))
    linears: Sequence[Linear] | None = None
    if observe.weights:  # one process reads each
        linears = [linear for _, linear in prepared.geometry.linears()]
        linears = group.share_of(linears if shard is None else shard.take(linears))
    sites: dict[Site, SiteStats] = {}
    unseen: Mapping[Site, str] = {}
    with ExitStack() as stack:
        passes: WholePass | LayerPass
        if streaming is None:
            passes = WholePass(prepared, linears or (), progress, journal)
        else:
            opened = open_streamed(prepared, checkpoint, find_distinct_tokens(todo), streaming)
            streamed = stack.enter_context(opened)
            passes = LayerPass(streamed, linears, progress, journal, work)
        has_rest = linears is not None and group.is_first and (shard is None or shard.index == 1)
        names = [name for name in checkpoint.tensors if has_rest and name not in passes.tensors]
        find_hashes = stack.enter_context(
            _reading_files(checkpoint, names, passes.device, is_hashed=group.is_first)
        )
        try:
            if todo and engine is None:
                recorder = Recorder(header.num_sequences, work)
                observer = stack.enter_context(open_observer(prepared, recorder, observe))
                sites = passes.observe(observer, todo, back_offs)
            else:
                passes.observe_weights()
            if todo and engine is not None:
                sites, unseen = engine.observe(
                    *(prepared, checkpoint, todo, observe),
                    num_sequences=header.num_sequences,
                    progress=progress,
                    journal=journal,
                )
        except CalibrationError:
            # NaN in a weight is the cause of that in an activation
            settle_weights(passes.weights, prepared)
            find_hashes()
            raise
        sites |= settle_weights(passes.weights, prepared)
        unquantized = find_hashes()
    sites = merge_sites([*group.gather(sites), *([] if journal is None else [journal.sites])])
    if plan is not None and observe.kv and group.is_first:
        _require_kv(prepared, sites)
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
            batch_size=batch_size,
            sequences=join_ranges(sequence_ranges(chosen)),
        )
    return CalibrationStats(
        header=header.model_copy(update=added),
        sites=sites,
        shard=part,
    )


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
        recipe_hash=observe.hash,
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
    """Look for NaN in tensors, and give what waits for the hashes of the header.

    It happens in a thread while the context is open; at once where the passes need the same cores,
    or the tensors are not in files.
    """

    def read() -> dict[str, str]:
        check_other_weights(checkpoint, names)
        return hash_unquantized(checkpoint.stored) if is_hashed else {}

    if device.type != "cuda" or not checkpoint.weight_files:
        hashes = read()
        yield lambda: hashes
        return
    with ThreadPoolExecutor(1, thread_name_prefix="read-files") as pool:
        reading = pool.submit(read)
        yield reading.result


def _require_kv(prepared: PreparedModel, sites: Mapping[Site, SiteStats]) -> None:
    for layer, attention in prepared.geometry.attentions():
        is_own = attention.producer is None and attention.module not in prepared.ignored
        if is_own and attention.site(Role.K) not in sites:
            raise CalibrationError(
                f"layer {layer.index} ({layer.mixer}) has a KV cache by its topology, but "
                "nothing was written to it"
            )
