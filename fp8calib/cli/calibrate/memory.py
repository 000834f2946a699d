"""What a calibration needs in memory, and the mode that follows from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.cli.calibrate.job import CalibrateJob
from fp8calib.cli.calibrate.rounding import (
    expect_rounding_s,
    make_rounding_probe,
    plan_rounding,
)
from fp8calib.data.plan import Batch
from fp8calib.data.shares import Share, select_batches
from fp8calib.machine.launch import ProcessRank, find_process_rank
from fp8calib.model.dtype import DTYPES
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.run.planning.footprint import Workload, stats_bytes
from fp8calib.run.planning.limits import find_limits, refuse_device_map
from fp8calib.run.planning.plan import PlanInputs
from fp8calib.run.planning.whole_or_streamed import MemoryMode, choose_memory_mode
from fp8calib.run.streaming.layer_observer import LayerObserver
from fp8calib.run.streaming.model import Streaming, open_streamed
from fp8calib.run.streaming.probe import Probe

_WHY_STREAMED = "layer by layer: each layer is rounded after the text has run through it"


def choose_calibration_mode(job: CalibrateJob) -> MemoryMode:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way.
    """
    settings, prepared = job.settings, job.prepared
    if settings.device_map is not None:
        refuse_device_map(settings.memory)
        return MemoryMode(plan=None, model=prepared.model, weights=prepared.weights)
    process_rank = find_process_rank(os.environ)
    found = _take_batches(job, process_rank)
    observe = job.recipe.observe
    statistics = stats_bytes(prepared.geometry, inputs=observe.inputs, weights=observe.weights)

    rounding = plan_rounding(job)

    def probe(model: LoadedModel, weights: WeightSource, streaming: Streaming) -> Probe | None:
        return _probe(job, model, weights, streaming, found) if found else None

    mode = choose_memory_mode(
        PlanInputs(
            model=prepared.model,
            geometry=prepared.geometry,
            checkpoint=job.checkpoint,
            weights=prepared.weights,
            work=Workload.of(found, len(_distinct(found))),
            itemsize=DTYPES[job.dtype].itemsize,
            extra={"statistics": statistics, **rounding},
        ),
        find_limits(job.device, settings.memory, sharers=process_rank.local_size),
        source=job.source,
        dtype=job.dtype,
        device=job.device,
        scratch=_nearest_folder(job.out),
        probe=probe,
        total_bytes=job.checkpoint.total_size_bytes if observe.weights else 0,
        always_streams=_WHY_STREAMED if rounding else "",
    )
    if rounding and mode.plan is not None and mode.plan.expected_s is not None:
        expected_s = mode.plan.expected_s + expect_rounding_s(job)
        mode = replace(mode, plan=replace(mode.plan, expected_s=expected_s))
    return mode


def _take_batches(job: CalibrateJob, process_rank: ProcessRank) -> Sequence[Batch]:
    """Give the batches of this process; those that an interrupted run has done are among them."""
    if job.plan is None:
        return []
    found = select_batches(job.plan, job.recipe.data.batch_size, job.shard)
    return Share(index=process_rank.rank + 1, count=process_rank.size).take(found)


def _probe(
    job: CalibrateJob,
    model: LoadedModel,
    weights: WeightSource,
    streaming: Streaming,
    found: Sequence[Batch],
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
            linears=[linear for _, linear in geometry.linears()],
            work=make_rounding_probe(job),
        )
        return observer.probe(batch, streaming)


def _distinct(found: Sequence[Batch]) -> torch.Tensor:
    used = [torch.zeros(1, dtype=torch.int64), *(batch.input_ids.flatten() for batch in found)]
    distinct: torch.Tensor = torch.unique(torch.cat(used))
    return distinct


def _nearest_folder(out: Path) -> Path:
    """Give the nearest existing folder above the output."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())
