"""What a calibration needs in memory, and the mode that follows from it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.jobs.calibration import choose_mode
from fp8calib.jobs.resumable.job import ResumableJob
from fp8calib.jobs.resumable.rounding import find_rounding
from fp8calib.quantization.gptq.layer_rounding import estimate_rounding_bytes, estimate_rounding_s
from fp8calib.run.planning.whole_or_streamed import MemoryMode

_WHY_STREAMED = "layer by layer: each layer is rounded after the text has run through it"


def choose_calibration_mode(job: ResumableJob) -> MemoryMode:
    """Choose between a model in memory whole and one that is streamed.

    Raises:
        UsageError: it fits in neither way.
    """
    rounding = find_rounding(job)
    extra = {}
    if rounding is not None:
        extra = {"rounding": estimate_rounding_bytes(rounding.matrices, rounding.inputs)}
    mode = choose_mode(
        job,
        scratch=Path.cwd() if job.out is None else _nearest_folder(job.out),
        process_rank=job.process_rank,
        extra_bytes=extra,
        work=None if rounding is None else rounding.probe(),
        always_streams="" if rounding is None else _WHY_STREAMED,
        expects_duration=job.expects_duration,
    )
    if rounding is not None and mode.plan is not None and mode.plan.expected_s is not None:
        device = torch.device(job.device)
        expected_s = estimate_rounding_s(rounding.matrices, rounding.inputs, device)
        plan = replace(mode.plan, expected_s=mode.plan.expected_s + expected_s)
        mode = replace(mode, plan=plan)
    return mode


def _nearest_folder(out: Path) -> Path:
    """Give the nearest existing folder above the output."""
    return next(folder for folder in out.absolute().parents if folder.is_dir())
