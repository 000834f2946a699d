"""Run a calibration in this process: how it uses memory, the pass over the text, what it cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration.calibrate import WorkShare, calibrate, make_header
from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.header import BackOff, StatsHeader
from fp8calib.calibration.memory_plan import MemoryPlan, Workload, find_limits, plan_memory
from fp8calib.calibration.processes import LONE, ProcessGroup
from fp8calib.commands.recipe import Recipe
from fp8calib.data.sequences import DataPlan
from fp8calib.data.shares import Share, select_batches
from fp8calib.jobs.models import RunModel
from fp8calib.jobs.processes import count_run
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.work_folder import WorkFolder
from fp8calib.machine.memory import PeakMemory
from fp8calib.machine.progress import Progress
from fp8calib.model.dtype import DTYPES

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
    mode = choose_mode(model, recipe, plan, scratch=Path.cwd())
    prepared = model.load(mode, progress)
    header = make_header(
        *(prepared, plan, model.source, model.checkpoint),
        observe=recipe.observe,
        recipe_name=recipe.name,
    )
    return calibrate(
        *(prepared, plan, model.checkpoint, header),
        observe=recipe.observe,
        batch_size=recipe.data.batch_size,
        progress=progress,
        streaming=mode.streaming,
    )


def choose_calibration_mode(job: ResumableJob) -> MemoryPlan:
    """Choose how a job holds its model (`choose_mode`)."""
    if job.engine is not None:  # it plans its own memory
        return MemoryPlan(prepared=job.prepared)
    scratch, extra = Path.cwd(), job.layer_job
    if job.out is not None:
        scratch = next(folder for folder in job.out.absolute().parents if folder.is_dir())
    return choose_mode(
        *(job, job.recipe, job.plan),
        scratch=scratch,
        shard=job.shard,
        group=job.group,
        extra_bytes={} if extra is None else {"work on layers": extra.estimate_bytes(job)},
        always_streams="" if extra is None else extra.why_streamed,
    )


def choose_mode(
    model: RunModel,
    recipe: Recipe,
    plan: DataPlan | None,
    *,
    scratch: Path,
    shard: Share | None = None,
    group: ProcessGroup = LONE,
    extra_bytes: Mapping[str, int] | None = None,
    always_streams: str = "",
) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    Args:
        model: the model.
        recipe: what is observed.
        plan: the text; None for a recipe that runs none.
        scratch: the folder of hidden states that do not fit into memory.
        shard: the part of the text.
        group: the processes that divide it.
        extra_bytes: further memory, by what needs it.
        always_streams: why the model has to be streamed; empty where it need not.

    Raises:
        UsageError: it fits in neither way.
    """
    if model.is_placed:
        return MemoryPlan(prepared=model.prepared)
    # those that an interrupted run has done are among them
    batches = [] if plan is None else select_batches(plan, recipe.data.batch_size, shard)
    sharers = group.process_rank.local_size
    inputs, weights = recipe.observe.inputs, recipe.observe.weights
    elements = sum(  # amax by channel; the plan's reserve covers the other statistics
        (inputs + weights) * linear.in_features + weights * linear.out_features
        for _, linear in model.prepared.geometry.linears()
    )
    return plan_memory(
        Workload(
            prepared=model.prepared,
            checkpoint=model.checkpoint,
            dtype=DTYPES[model.dtype],
            device=model.device,
            batches=group.share_of(batches),
            scratch=scratch,
            sharers=sharers,
            extra={"statistics": elements * torch.float32.itemsize, **(extra_bytes or {})},
            least_read_bytes=model.checkpoint.total_size_bytes if weights else 0,
            always_streams=always_streams,
        ),
        find_limits(model.device, model.memory, sharers=sharers),
    )


def run_job(
    job: ResumableJob, mode: MemoryPlan, header: StatsHeader, work: WorkFolder | None
) -> tuple[CalibrationStats, dict[str, Any]]:
    """Run the calibration of a job, with its work on layers if it has some.

    Without a working folder it cannot be resumed, and works on no layer.

    Returns:
        The statistics, and what the run cost, as fields of a `CalibrateResult`.
    """
    progress, group = job.reporter, job.group
    journal = None if work is None else work.journal
    where = job.device if job.engine is None else job.engine.describe()
    progress.say(f"computing in {job.dtype} on {where} ({job.dtype_why})")
    if group.size > 1:
        threads = torch.get_num_threads()
        progress.say(f"{group.size} processes share the data, with {threads} threads each")
    started = time.monotonic()
    share = WorkShare(shard=job.shard, journal=journal, group=group)
    layer_work = None
    if work is not None and job.layer_job is not None:
        layer_work = job.layer_job.open(job, work.path)
    with PeakMemory() as memory, group.peer_failures():
        stats = calibrate(
            job.load(mode, progress) if job.engine is None else job.prepared,
            job.plan,
            job.checkpoint,
            header,
            observe=job.recipe.observe,
            batch_size=job.recipe.data.batch_size,
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
        "tokens_per_s": (count_run(job, stats)["tokens"] - sum(tokens)) / duration_s,
        "memory": {**mode.as_json(), "peak_measured_bytes": memory.peak_bytes},
        "batch_back_off": tuple(BackOff(**each) for of_rank in back_offs for each in of_rank),
        "resumed_sequences": len(tokens),
        "ranks": group.size,
    }
