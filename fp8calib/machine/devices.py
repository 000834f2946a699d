"""The device that `--device` names."""

from __future__ import annotations

import re

import torch

from fp8calib.errors import UsageError


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
