"""Run a resumable calibration: how it uses memory, the pass over the text, and what it cost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from fp8calib.calibration import calibrate
from fp8calib.data.sequences import DataPlan
from fp8calib.jobs.calibration import choose_mode
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.work_folder import WorkFolder
from fp8calib.machine.memory import PeakMemory
from fp8calib.run.forward.back_off import BackOff
from fp8calib.run.memory_plan import MemoryPlan
from fp8calib.run.resume.journal import NOTHING, Done
from fp8calib.run.resume.work_share import WorkShare
from fp8calib.stats.calibration_stats import CalibrationStats


@dataclass(frozen=True, slots=True, kw_only=True)
class RunMeasurements:
    """What the run cost."""

    duration_s: float
    memory: Mapping[str, Any]
    """The memory mode, its plan, and the measured peak."""
    back_offs: tuple[BackOff, ...]
    """Where batches became smaller because memory ran out."""
    resumed: int
    """Sequences that an interrupted run had finished."""
    resumed_tokens: int
    """Tokens in them; `duration_s` does not include these."""
    num_ranks: int


def choose_calibration_mode(job: ResumableJob) -> MemoryPlan:
    """Choose between holding the whole model in memory and streaming it.

    Raises:
        UsageError: it fits in neither way.
    """
    if job.engine is not None:  # it plans its own memory
        return MemoryPlan(prepared=job.prepared)
    extra = job.layer_job
    return choose_mode(
        job,
        job.recipe,
        job.plan,
        shard=job.shard,
        scratch=Path.cwd() if job.out is None else _nearest_folder(job.out),
        group=job.group,
        extra_bytes={} if extra is None else {"work on layers": extra.estimate_bytes(job)},
        always_streams="" if extra is None else extra.why_streamed,
    )


def _nearest_folder(out: Path) -> Path:
    """Give the nearest existing folder above the output."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())


def run_job(
    job: ResumableJob, mode: MemoryPlan, work: WorkFolder | None
) -> tuple[CalibrationStats, RunMeasurements]:
    """Run the calibration of a job, with its work on layers if it has some.

    Without a working folder it cannot be resumed, and works on no layer.
    """
    progress, group = job.reporter, job.group
    journal = None if work is None else work.journal
    done = NOTHING if journal is None else journal.done
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
            job.source,
            job.checkpoint,
            recipe=job.recipe,
            progress=progress,
            streaming=mode.streaming,
            share=share,
            work=layer_work,
            engine=job.engine,
        )
        back_offs = _gather_back_offs(share)
    measured = RunMeasurements(
        duration_s=time.monotonic() - started,
        memory={**mode.as_json(), "peak_measured_bytes": memory.peak_bytes},
        back_offs=back_offs,
        resumed=done.num_sequences,
        resumed_tokens=_count_tokens(job.plan, done),
        num_ranks=group.size,
    )
    return stats, measured


def _gather_back_offs(share: WorkShare) -> tuple[BackOff, ...]:
    """Gather from all processes where batches became smaller."""
    gathered = share.group.all_gather([asdict(each) for each in share.back_offs])
    return tuple(BackOff(**each) for all_of_one in gathered for each in all_of_one)


def _count_tokens(plan: DataPlan | None, done: Done) -> int:
    if plan is None:
        return 0
    return sum(len(each) for first, stop in done.sequences for each in plan.sequences[first:stop])
