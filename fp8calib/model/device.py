"""The device and the dtype of the forward pass, and the threads of the CPU."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint, stored_dtype
from fp8calib.errors import UsageError
from fp8calib.machine import ProcessRank, available_bytes
from fp8calib.text import GIB

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
CPU_INFO = Path("/proc/cpuinfo")
_BF16_FLAGS = ("amx_bf16", "avx512_bf16")
_HEADROOM = 1.2


def choose_device(name: str) -> str:
    """Convert a name to that of torch (`cpu`, `cuda:0`); `auto` is the first GPU, or the CPU.

    Raises:
        UsageError: there is no such device.
    """
    if name == "auto":
        return "cuda:0" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return name
    found = re.fullmatch(r"cuda(?::(\d+))?", name)
    count, index = torch.cuda.device_count(), int((found and found[1]) or 0)
    if found is None or index >= count:
        known = f"auto, cpu, cuda or one of {count} CUDA devices (cuda:N)"
        raise UsageError(f"--device {name}: not {known}", hint="use --device cpu")
    return f"cuda:{index}"


def choose_rank_device(
    device: str, process_rank: ProcessRank, *, device_map: str | None = None
) -> str:
    """Choose the device of one process: every process on a machine gets a GPU of its own."""
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


def choose_dtype(requested: str, *, device: str, checkpoint: Checkpoint) -> tuple[str, str]:
    """Resolve `auto` to a dtype.

    On a GPU it is the checkpoint's dtype. On a CPU it is bfloat16 if the processor multiplies it in
    hardware or if float32 does not fit into memory, else float32. Nothing is timed.

    Returns:
        The name of the dtype, and the reason for people.

    Raises:
        UsageError: `requested` is not the name of a dtype.
    """
    if requested != "auto":
        if requested not in DTYPES:
            raise UsageError(f"--dtype {requested}: not one of auto, {', '.join(DTYPES)}")
        return requested, "as requested"
    stored = stored_dtype(checkpoint)
    if device != "cpu":
        is_known = stored in DTYPES
        return (stored, "the checkpoint's") if is_known else ("bfloat16", f"for {stored} weights")
    found = re.search(r"^flags.*:(.*)", CPU_INFO.read_text(), re.M) if CPU_INFO.is_file() else None
    flags = found[1].split() if found else []
    if flag := next((name for name in _BF16_FLAGS if name in flags), ""):
        return "bfloat16", f"the processor has {flag}"
    num_elements = sum(math.prod(entry.shape) for entry in checkpoint.tensors.values())
    needed = num_elements * 4 * _HEADROOM
    available = available_bytes()
    if needed > available:
        return "bfloat16", (
            f"float32 needs {needed / GIB:.1f} GiB and {available / GIB:.1f} GiB are free"
        )
    return "float32", f"the processor has neither {' nor '.join(_BF16_FLAGS)}"
