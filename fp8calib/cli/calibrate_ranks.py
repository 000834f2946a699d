"""What is different about a calibration that several processes run together."""

from __future__ import annotations

from dataclasses import asdict

import torch

from fp8calib.cli.calibrate_job import Settings
from fp8calib.errors import UsageError
from fp8calib.machine.launch import Place
from fp8calib.model.load import choose_device
from fp8calib.run.distributed.group import Crew
from fp8calib.run.forward.whole import BackOff
from fp8calib.run.resume.work_share import Portion


def choose_rank_device(settings: Settings, place: Place) -> str:
    """Choose the device of one process: of those on a machine, each has a GPU to itself.

    Raises:
        UsageError: there are fewer GPUs than processes, or the model would be spread over all.
    """
    if place.size == 1:
        return settings.device
    if settings.device_map is not None:
        raise UsageError(
            "--device-map spreads the model over the GPUs, which several processes share out",
            hint="leave it out, or start one process",
        )
    device = choose_device(settings.device)
    if not device.startswith("cuda"):
        return device
    count = torch.cuda.device_count()
    if place.local_size > count:
        raise UsageError(
            f"{place.local_size} processes were started on a machine with {count} GPUs",
            hint=f"use torchrun --nproc-per-node {count}, or --device cpu",
        )
    torch.cuda.set_device(place.local_rank)
    return f"cuda:{place.local_rank}"


def describe_crew(crew: Crew) -> str:
    """Say how many processes run."""
    threads = torch.get_num_threads()
    return f"{crew.place.size} processes share the data, with {threads} threads each"


def gather_back_offs(portion: Portion) -> tuple[BackOff, ...]:
    """Learn of all processes where batches became smaller."""
    own = [asdict(each) for each in portion.back_offs]
    told = [own] if portion.crew is None else portion.crew.gather(own)
    return tuple(BackOff(**each) for all_of_one in told for each in all_of_one)
