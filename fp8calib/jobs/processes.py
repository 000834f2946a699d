"""Devices, counts and messages of a calibration in several processes or shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.commands.result import ShardIndex
from fp8calib.data.shares import select_batches
from fp8calib.errors import UsageError
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.machine.devices import choose_device
from fp8calib.machine.process_rank import ProcessRank


def choose_rank_device(
    device: str, process_rank: ProcessRank, *, device_map: str | None = None
) -> str:
    """Choose the device of one process: every process on a machine gets a GPU of its own.

    Raises:
        UsageError: there are fewer GPUs than processes, or --device-map is given.
    """
    if process_rank.size == 1:
        return device
    if device_map is not None:
        raise UsageError(
            "--device-map spreads the model over all GPUs, but each process needs its own GPU",
            hint="leave it out, or start one process",
        )
    device = choose_device(device)
    if not device.startswith("cuda"):
        return device
    count = torch.cuda.device_count()
    if process_rank.local_size > count:
        raise UsageError(
            f"{process_rank.local_size} processes were started on a machine with {count} GPUs",
            hint=f"use torchrun --nproc-per-node {count}, or --device cpu",
        )
    torch.cuda.set_device(process_rank.local_rank)
    return f"cuda:{process_rank.local_rank}"


def check_shard(job: ResumableJob) -> None:
    """Refuse a shard that would be empty, before the model is loaded.

    Raises:
        UsageError: the recipe runs no data, or there are fewer batches than shards.
    """
    shard = job.shard
    if shard is None:
        return
    if job.plan is None:
        raise UsageError(
            f"--shard: recipe {job.recipe.name} runs no data, so there is nothing to divide",
            hint="leave out --shard",
        )
    select_batches(job.plan, job.recipe.data.batch_size, shard)


def count_planned(job: ResumableJob) -> Mapping[str, Any]:
    """Count the sequences and tokens of the planned run, and name its shard."""
    shard = job.shard
    found = [] if job.plan is None else select_batches(job.plan, job.recipe.data.batch_size, shard)
    return {
        "sequences": sum(len(batch.lengths) for batch in found),
        "tokens": sum(batch.num_tokens for batch in found),
        **({} if shard is None else {"shard": ShardIndex(index=shard.index, count=shard.count)}),
    }


def count_run(job: ResumableJob, stats: CalibrationStats) -> Mapping[str, Any]:
    """Count the tokens and sequences of the finished run, and name its shard."""
    part = stats.shard
    if part is None or job.plan is None:
        return {"tokens": stats.header.num_tokens, "sequences": stats.header.num_sequences}
    run = [
        sequence for first, stop in part.sequences for sequence in job.plan.sequences[first:stop]
    ]
    return {
        "tokens": sum(map(len, run)),
        "sequences": len(run),
        "shard": ShardIndex(index=part.index, count=part.count),
    }
