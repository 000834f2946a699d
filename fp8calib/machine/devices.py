"""The device that `--device` names."""

from __future__ import annotations

import re

import torch

from fp8calib.errors import UsageError


def find_device(name: str) -> str:
    """Spell a device as torch does (`cpu`, `cuda:0`), and see that the machine has it.

    Raises:
        UsageError: it is none, or the machine has it not.
    """
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
