"""What a calibration needs in memory, and the mode that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.jobs.calibration import choose_mode
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.rounding import find_rounding, make_rounding_probe
from fp8calib.run.memory_plan.whole_or_streamed import MemoryMode

_WHY_STREAMED = "layer by layer: each layer is rounded after the text has run through it"


def choose_calibration_mode(job: ResumableJob) -> MemoryMode:
    """Choose between holding the whole model in memory and streaming it.

    Raises:
        UsageError: it fits in neither way.
    """
    if job.engine is not None:  # it plans its own memory
        return MemoryMode(plan=None, prepared=job.prepared)
    rounding = find_rounding(job)
    mode = choose_mode(
        job,
        job.recipe,
        job.plan,
        shard=job.shard,
        scratch=Path.cwd() if job.out is None else _nearest_folder(job.out),
        group=job.group,
        extra_bytes={} if rounding is None else {"rounding": rounding.estimate_bytes()},
        work=None if rounding is None else make_rounding_probe(job, rounding),
        always_streams=_WHY_STREAMED if rounding else "",
        expects_duration=job.expects_duration,
    )
    if rounding and mode.plan is not None and mode.plan.expected_s is not None:
        expected_s = mode.plan.expected_s + rounding.estimate_s(torch.device(job.device))
        mode = replace(mode, plan=replace(mode.plan, expected_s=expected_s))
    return mode


def _nearest_folder(out: Path) -> Path:
    """Give the nearest existing folder above the output."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())
