"""What memory there is for a run: asked of the machine, or given."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8calib.errors import UsageError
from fp8calib.machine.memory import anonymous_bytes, available_bytes

_GIB = 2**30
_OTHERS_SHARE = 0.1
"""Of what is available, left to others, who may want more while the run lasts."""
_UNKNOWN_PROCESS_BYTES = 2**29
"""What the interpreter and the libraries take where nobody counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What memory there is."""

    host_bytes: int
    """What the process may hold, its interpreter and libraries included."""
    host_why: str
    """Who says so: `given by --memory`, `available`."""
    is_given: bool
    """Whether a larger --memory would help."""
    process_bytes: int
    """What it holds already."""
    device_bytes: int | None
    """What is free on the GPU; None where the model runs on the CPU."""
    sharers: int = 1
    """How many processes write to the same disk, as much as this one each."""


def find_limits(device: str, memory_gib: float | None, *, sharers: int = 1) -> Limits:
    """Ask the machine what memory it has left, and hold that against --memory.

    Args:
        device: where the model runs.
        memory_gib: --memory, the cap of each process.
        sharers: how many processes share what the machine has left, its disk included.

    Raises:
        UsageError: --memory is no amount of memory.
    """
    if memory_gib is not None and not 0 < memory_gib < math.inf:
        raise UsageError(f"--memory {memory_gib}: a number of GiB above 0 is needed")
    device_bytes = None
    if device != "cpu":
        device_bytes = int(torch.cuda.mem_get_info(device)[0] * (1 - _OTHERS_SHARE))
    process = anonymous_bytes() or _UNKNOWN_PROCESS_BYTES
    found = process + int(available_bytes() * (1 - _OTHERS_SHARE)) // sharers
    given = None if memory_gib is None else int(memory_gib * _GIB)
    is_given = given is not None and given <= found
    return Limits(
        host_bytes=given if given is not None and is_given else found,
        host_why="given by --memory" if is_given else "available",
        is_given=is_given,
        process_bytes=process,
        device_bytes=device_bytes,
        sharers=sharers,
    )


def refuse_device_map(memory_gib: float | None) -> None:
    """Refuse --memory beside --device-map.

    Raises:
        UsageError: they contradict each other.
    """
    if memory_gib is not None:
        raise UsageError(
            "--memory streams a model through one device, and --device-map spreads it over all",
            hint="leave one of them out",
        )
