"""How `calibrate` fits a model into memory: whole, or layer by layer; decided before it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration import PreparedModel
from fp8calib.cli.calibrate.job import Job
from fp8calib.data.plan import Batch
from fp8calib.data.shares import Share, share_out
from fp8calib.machine.launch import ProcessRank, find_process_rank
from fp8calib.model.dtype import DTYPES
from fp8calib.model.load import build_skeleton
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.planning.footprint import Workload, stats_bytes
from fp8calib.run.planning.limits import find_limits, refuse_device_map
from fp8calib.run.planning.plan import RunPlan, Streamable, describe_run, plan_whole
from fp8calib.run.planning.stream_plan import StreamPlanner, plan_streamed
from fp8calib.run.streaming.calibration import LayerObserver
from fp8calib.run.streaming.model import Streaming, open_streamed
from fp8calib.run.streaming.probe import Probe


@dataclass(frozen=True, slots=True, kw_only=True)
class Mode:
    """How the model of a job is run."""

    plan: RunPlan | None
    """None where --device-map spreads it: nothing is planned then."""
    prepared: PreparedModel
    streaming: Streaming | None = None
    """None: whole."""

    def as_json(self) -> Mapping[str, Any]:
        """Give what `--json` and report.json say of it."""
        return {"streamed": False} if self.plan is None else self.plan.as_json()


def choose_mode(job: Job) -> Mode:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way.
    """
    settings = job.settings
    if settings.device_map is not None:
        refuse_device_map(settings.memory)
        return Mode(plan=None, prepared=job.prepared)
    place = find_process_rank(os.environ)
    limits = find_limits(job.device, settings.memory, sharers=place.local_size)
    found = list(_take_batches(job, place))
    subject = _describe(job, job.prepared, found)
    scratch = _nearest_folder(job.out)
    if (whole := plan_whole(subject, limits, scratch)) is not None:
        return Mode(plan=whole, prepared=job.prepared)
    prepared = _without_weights(job)
    planner = plan_streamed(
        _describe(job, prepared, found),
        limits,
        dtype=DTYPES[job.dtype],
        device=job.device,
        scratch=scratch,
    )
    return _stream(job, prepared, planner, found)


def _take_batches(job: Job, place: ProcessRank) -> Sequence[Batch]:
    """Give the batches that this process will run; what is done already is not known here."""
    if job.plan is None:
        return []
    found = share_out(job.plan, job.recipe.data.batch_size, job.settings.shard)
    return Share(index=place.rank + 1, count=place.size).take(found)


def describe_mode(mode: Mode) -> Iterator[str]:
    """Say how the model will be run."""
    if mode.plan is not None:
        yield from describe_run(mode.plan)


def _describe(job: Job, prepared: PreparedModel, found: list[Batch]) -> Streamable:
    observe = job.recipe.observe
    statistics = stats_bytes(prepared.geometry, inputs=observe.inputs, weights=observe.weights)
    return Streamable(
        model=prepared.model,
        geometry=prepared.geometry,
        checkpoint=job.checkpoint,
        weights=prepared.weights,
        work=Workload.of(found, len(_distinct(found))),
        itemsize=DTYPES[job.dtype].itemsize,
        extra={"statistics": statistics},
    )


def _stream(job: Job, prepared: PreparedModel, planner: StreamPlanner, found: list[Batch]) -> Mode:
    plan = planner.plan()
    others = job.checkpoint.total_size_bytes if job.recipe.observe.weights else 0
    if found:
        largest = max(found, key=lambda batch: batch.input_ids.numel())
        probe = _probe(job, prepared, _streaming(job, plan), largest)
        plan = planner.plan(probe, total_bytes=others)
    else:
        plan = planner.plan(total_bytes=others)
    return Mode(plan=plan, prepared=prepared, streaming=_streaming(job, plan))


def _without_weights(job: Job) -> PreparedModel:
    """Build the model once more, in the dtype it will compute in."""
    model = build_skeleton(job.source, dtype=DTYPES[job.dtype])
    return replace(job.prepared, model=model, weights=WeightSource(model, job.checkpoint))


def _streaming(job: Job, plan: RunPlan) -> Streaming:
    return Streaming(
        dtype=DTYPES[job.dtype],
        device=job.device,
        hidden_ram_bytes=plan.hidden_ram_bytes,
        scratch=plan.scratch,
    )


def _probe(job: Job, prepared: PreparedModel, streaming: Streaming, batch: Batch) -> Probe:
    with open_streamed(
        prepared.model,
        prepared.geometry,
        prepared.weights,
        job.checkpoint,
        torch.unique(batch.input_ids),
        streaming,
    ) as streamed:
        observer = LayerObserver(
            streamed,
            job.checkpoint,
            job.recipe.observe,
            ignored=prepared.ignored,
            linears=[linear for _, linear in prepared.geometry.linears()],
        )
        return observer.probe(batch, streaming)


def _distinct(found: Sequence[Batch]) -> torch.Tensor:
    used = [torch.zeros(1, dtype=torch.int64), *(batch.input_ids.flatten() for batch in found)]
    distinct: torch.Tensor = torch.unique(torch.cat(used))
    return distinct


def _nearest_folder(out: Path) -> Path:
    """Give the folder that the output will lie in, or the nearest one above it that is there."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())
