"""What a calibration needs in memory, and the mode that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fp8calib.jobs.calibration import choose_mode
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.rounding import (
    expect_rounding_s,
    make_rounding_probe,
    plan_rounding,
)
from fp8calib.run.planning.whole_or_streamed import MemoryMode

_WHY_STREAMED = "layer by layer: each layer is rounded after the text has run through it"


def choose_calibration_mode(job: ResumableJob) -> MemoryMode:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way.
    """
    rounding = plan_rounding(job)
    mode = choose_mode(
        job,
        scratch=Path.cwd() if job.out is None else _nearest_folder(job.out),
        process_rank=job.process_rank,
        extra_bytes=rounding,
        work=make_rounding_probe(job),
        always_streams=_WHY_STREAMED if rounding else "",
        expects_duration=job.expects_duration,
    )
    if rounding and mode.plan is not None and mode.plan.expected_s is not None:
        expected_s = mode.plan.expected_s + expect_rounding_s(job)
        mode = replace(mode, plan=replace(mode.plan, expected_s=expected_s))
    return mode


def _nearest_folder(out: Path) -> Path:
    """Give the nearest existing folder above the output."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())
