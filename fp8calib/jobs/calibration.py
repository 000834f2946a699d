"""Run a calibration in this process: how it uses memory, the pass over the text, what it cost."""

from __future__ import annotations

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration.calibrate import WorkShare, calibrate
from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.header import BackOff, StatsHeader
from fp8calib.calibration.journal import Journal
from fp8calib.calibration.memory_plan import (
    MemoryPlan,
    Workload,
    find_limits,
    plan_halved,
)
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.machine import PeakMemory
from fp8calib.model.dtype import DTYPES

IF_QUANTIZED = (
    "its activations have quantization errors already: calibrate the unquantized model it was made "
    "from"
)


def choose_mode(job: ResumableJob) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way.
    """
    if job.engine is not None or job.is_placed:
        return MemoryPlan(prepared=job.prepared)
    scratch = Path.cwd()
    if job.out is not None:
        scratch = next(folder for folder in job.out.absolute().parents if folder.is_dir())
    inputs, weights = job.recipe.observe.inputs, job.recipe.observe.weights
    elements = sum(  # amax by channel; the plan's reserve covers the other statistics
        (inputs + weights) * linear.in_features + weights * linear.out_features
        for _, linear in job.prepared.geometry.linears()
    )
    extra = {"statistics": elements * torch.float32.itemsize}
    if job.layer_job is not None:
        extra["work on layers"] = job.layer_job.estimate_bytes(job)
    sharers = job.group.process_rank.local_size
    work = Workload(
        prepared=job.prepared,
        checkpoint=job.checkpoint,
        dtype=DTYPES[job.dtype],
        device=job.device,
        batches=job.group.share_of(job.list_batches()),
        scratch=scratch,
        sharers=sharers,
        extra=extra,
        least_read_bytes=job.checkpoint.total_size_bytes if weights else 0,
        always_streams="" if job.layer_job is None else job.layer_job.why_streamed,
    )
    limits = find_limits(job.device, job.memory, sharers=sharers)
    return plan_halved(work, limits, job.batch_size if job.recipe.data.batch_size is None else 1)


def run_job(
    job: ResumableJob, mode: MemoryPlan, header: StatsHeader, journal: Journal | None
) -> tuple[CalibrationStats, dict[str, Any]]:
    """Run the calibration of a job, with its work on layers if it has some.

    Without a journal it cannot be resumed, and works on no layer.

    Returns:
        The statistics, and what the run cost, as fields of a `CalibrateResult`.
    """
    progress, group = job.reporter, job.group
    where = job.device if job.engine is None else job.engine.describe()
    progress.say(f"computing in {job.dtype} on {where} ({job.dtype_why})")
    if group.size > 1:
        threads = torch.get_num_threads()
        progress.say(f"{group.size} processes share the data, with {threads} threads each")
    started = time.monotonic()
    share = WorkShare(shard=job.shard, journal=journal, group=group)
    layer_work = None
    if journal is not None and job.layer_job is not None:
        layer_work = job.layer_job.open(job, journal.folder)
    with PeakMemory() as memory, group.peer_failures():
        stats = calibrate(
            job.load(mode, progress) if job.engine is None else job.prepared,
            job.plan,
            job.checkpoint,
            header,
            observe=job.recipe.observe,
            batch_size=job.batch_size,
            progress=progress,
            streaming=mode.streaming,
            share=share,
            work=layer_work,
            engine=job.engine,
        )
        back_offs = group.all_gather([asdict(each) for each in share.back_offs])
    duration_s = time.monotonic() - started
    resumed = () if journal is None else journal.sequences
    sequences = () if job.plan is None else job.plan.sequences
    tokens = [len(each) for first, stop in resumed for each in sequences[first:stop]]
    return stats, {
        "duration_s": duration_s,
        # without those that an interrupted run had finished
        "tokens_per_s": (job.count()["tokens"] - sum(tokens)) / duration_s,
        "memory": {**mode.as_json(), "peak_measured_bytes": memory.peak_bytes},
        "batch_back_off": tuple(BackOff(**each) for of_rank in back_offs for each in of_rank),
        "resumed_sequences": len(tokens),
        "ranks": group.size,
    }
