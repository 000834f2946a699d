"""A calibration, decided before a weight is loaded, and run in this process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib import calibration
from fp8calib.data.rows import Row
from fp8calib.data.sequences import Batch, DataPlan
from fp8calib.data.shares import Share, select_batches
from fp8calib.errors import ModelError
from fp8calib.jobs.models import RunModel, open_run_model, place
from fp8calib.jobs.stats import CalibrationStats
from fp8calib.jobs.text import plan_text
from fp8calib.machine.process_rank import ALONE, ProcessRank
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES
from fp8calib.model.load import LoadedModel
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.recipe import Recipe
from fp8calib.requests.auto import AutoRequest
from fp8calib.requests.plan import PlanRequest
from fp8calib.run.memory_plan.footprint import Workload, stats_bytes
from fp8calib.run.memory_plan.limits import find_limits, refuse_device_map
from fp8calib.run.memory_plan.plan import PlanInputs
from fp8calib.run.memory_plan.whole_or_streamed import MemoryMode, choose_memory_mode
from fp8calib.run.streaming.layer_observer import LayerObserver, LayerWork
from fp8calib.run.streaming.model import Streaming, open_streamed
from fp8calib.run.streaming.probe import Probe

IF_QUANTIZED = (
    "its activations have quantization errors already: calibrate the unquantized model it was made "
    "from"
)


def run_calibration(
    model: RunModel, recipe: Recipe, plan: DataPlan | None, progress: Progress
) -> CalibrationStats:
    """Run the text through an opened model in this process, without checkpoints of the run.

    Raises:
        UsageError: the model fits into memory in no way.
        CalibrationError: the forward pass failed, or gave NaN or infinity.
    """
    job = CalibrationJob(**fields_of(model), recipe=recipe, plan=plan)
    mode = choose_mode(job, scratch=Path.cwd())
    stats = calibration.calibrate(
        load_prepared(job, mode, progress),
        plan,
        model.source,
        model.checkpoint,
        recipe=recipe,
        batch_size=recipe.data.batch_size,
        progress=progress,
        streaming=mode.streaming,
    )
    return CalibrationStats.of(stats)


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationJob(RunModel):
    """A model and what is to be observed of it, decided before a weight is loaded."""

    recipe: Recipe
    """With the caller's changes."""
    plan: DataPlan | None
    """None for a recipe that runs no data."""
    shard: Share | None = None


def fields_of(model: RunModel) -> dict[str, Any]:
    """Give the fields of a model to run, to make a job of it."""
    return {name: getattr(model, name) for name in RunModel.__dataclass_fields__}


@contextmanager
def open_unquantized(request: AutoRequest | PlanRequest, recipe: Recipe) -> Iterator[RunModel]:
    """Open a model to calibrate and to quantize.

    Raises:
        ModelError: the model cannot be read or run, or is quantized.
    """
    with open_run_model(
        request.model,
        place(request),
        revision=request.revision,
        trust_remote_code=request.trust_remote_code,
        if_quantized=IF_QUANTIZED,
        recipe=recipe,
    ) as model:
        if model.checkpoint.form:
            raise ModelError(
                f"{request.model} is quantized already: {model.checkpoint.form}",
                hint="name the unquantized model that it was made from",
            )
        yield model


def plan_recipe_text(
    model: RunModel, recipe: Recipe, rows: Iterable[Row] | None = None, *, tokenizer: Any = None
) -> DataPlan | None:
    """Plan the data of a recipe; None if it runs none. `rows` replace the recipe's sources.

    Raises:
        UsageError: the length is above the model's maximum.
        DataError: the data cannot be read.
    """
    if not recipe.observe.needs_forward:
        return None
    return plan_text(model.source, recipe.data, rows=rows, part="calibrate", tokenizer=tokenizer)


def load_prepared(job: CalibrationJob, mode: MemoryMode, progress: Progress) -> PreparedModel:
    """Give the model with its weights, or the one that is streamed.

    Raises:
        CalibrationError: the memory is too small.
        ModelError: a weight is missing or has another shape.
    """
    if mode.streaming is not None:
        return replace(job.prepared, model=mode.model, weights=mode.weights)
    model = job.load(progress)
    if job.is_live:
        return job.prepared
    return replace(job.prepared, model=model, weights=WeightSource(model, job.checkpoint))


def choose_mode(
    job: CalibrationJob,
    *,
    scratch: Path,
    process_rank: ProcessRank = ALONE,
    extra_bytes: Mapping[str, int] | None = None,
    work: LayerWork | None = None,
    always_streams: str = "",
    expects_duration: bool = False,
) -> MemoryMode:
    """Choose between a model in memory whole and one that is streamed.

    Args:
        job: the job.
        scratch: the folder of hidden states that do not fit into memory.
        process_rank: which of several processes this is.
        extra_bytes: further memory, by what needs it.
        work: also gets the inputs of each layer.
        always_streams: why the model has to be streamed; empty where it need not.
        expects_duration: predict the time of a run with the whole model too.

    Raises:
        UsageError: it fits in neither way.
    """
    prepared, placement = job.prepared, job.placement
    if placement.device_map is not None or job.is_live:
        if placement.device_map is not None:
            refuse_device_map(placement.memory)
        return MemoryMode(plan=None, model=prepared.model, weights=prepared.weights)
    found = _take_batches(job, process_rank)
    observe = job.recipe.observe
    statistics = stats_bytes(prepared.geometry, inputs=observe.inputs, weights=observe.weights)

    def probe(model: LoadedModel, weights: WeightSource, streaming: Streaming) -> Probe | None:
        return _probe(job, model, weights, streaming, found, work) if found else None

    return choose_memory_mode(
        PlanInputs(
            model=prepared.model,
            geometry=prepared.geometry,
            checkpoint=job.checkpoint,
            weights=prepared.weights,
            work=Workload.of(found),
            itemsize=DTYPES[job.dtype].itemsize,
            extra={"statistics": statistics, **(extra_bytes or {})},
        ),
        find_limits(job.device, placement.memory, sharers=process_rank.local_size),
        source=job.source,
        dtype=job.dtype,
        device=job.device,
        scratch=scratch,
        probe=probe,
        total_bytes=job.checkpoint.total_size_bytes if observe.weights else 0,
        always_streams=always_streams,
        expects_duration=expects_duration,
    )


def _take_batches(job: CalibrationJob, process_rank: ProcessRank) -> Sequence[Batch]:
    """Give the batches of this process; those that an interrupted run has done are among them."""
    if job.plan is None:
        return []
    found = select_batches(job.plan, job.recipe.data.batch_size, job.shard)
    return Share(index=process_rank.rank + 1, count=process_rank.size).take(found)


def _probe(
    job: CalibrationJob,
    model: LoadedModel,
    weights: WeightSource,
    streaming: Streaming,
    found: Sequence[Batch],
    work: LayerWork | None,
) -> Probe:
    """Run the largest batch through the first layer."""
    geometry = job.prepared.geometry
    batch = max(found, key=lambda batch: batch.input_ids.numel())
    tokens = torch.unique(batch.input_ids)
    with open_streamed(model, geometry, weights, job.checkpoint, tokens, streaming) as streamed:
        observer = LayerObserver(
            streamed,
            job.checkpoint,
            job.recipe.observe,
            ignored=job.prepared.ignored,
            towers=job.prepared.towers,
            linears=[linear for _, linear in geometry.linears()],
            work=work,
        )
        return observer.probe(batch, streaming)
