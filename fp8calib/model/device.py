"""The device that `--device` names, and the threads of the CPU."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fp8calib.errors import UsageError
from fp8calib.machine import ProcessRank


def choose_device(name: str) -> str:
    """Convert a name to the one torch uses (`cpu`, `cuda:0`); `auto` is the first GPU, or the CPU.

    Raises:
        UsageError: it is not a device, or the machine does not have it.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    if found is None:
        raise UsageError(f"--device {name}: not auto, cpu, cuda or cuda:N")
    count, index = torch.cuda.device_count(), int(found.group(1) or 0)
    if index >= count:
        raise UsageError(
            f"--device {name}: this machine has {count} CUDA devices", hint="use --device cpu"
        )
    return f"cuda:{index}"


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
            hint="leave out --device-map, or start one process",
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


@contextmanager
def one_thread() -> Iterator[None]:
    """Let torch start no threads of its own, which cost more than they save on small tensors."""
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(count)
