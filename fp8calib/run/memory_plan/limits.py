"""The memory limits of a run: measured on the machine, or given by `--memory`."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8calib.errors import UsageError
from fp8calib.machine.memory import anonymous_bytes, available_bytes
from fp8calib.machine.units import GIB

_RESERVED_SHARE = 0.1
"""The share of the available memory left to other programs, which may grow during the run."""
_UNKNOWN_PROCESS_BYTES = 2**29
"""The assumed size of the interpreter and the libraries, if the system does not count it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How much memory a run may use."""

    host_bytes: int
    """The most memory the process may hold, interpreter and libraries included."""
    host_why: str
    """Where the limit is from: `given by --memory`, `available`."""
    is_given: bool
    """Whether --memory sets the limit, so that a larger one would help."""
    process_bytes: int
    """How much memory the process holds already."""
    device_bytes: int | None
    """Free memory of the GPU; None where the model runs on the CPU."""
    sharers: int = 1
    """How many processes share the disk, each writing as much as this one."""


def find_limits(device: str, memory_gib: float | None, *, sharers: int = 1) -> Limits:
    """Measure the available memory, and take the smaller of it and --memory.

    --memory is the limit of each process; `sharers` processes share the machine.

    Raises:
        UsageError: --memory is not a positive number.
    """
    if memory_gib is not None and not 0 < memory_gib * GIB < math.inf:
        raise UsageError(f"--memory {memory_gib}: must be a number of GiB above 0")
    device_bytes = None
    if device != "cpu":
        device_bytes = int(torch.cuda.mem_get_info(device)[0] * (1 - _RESERVED_SHARE))
    process = anonymous_bytes() or _UNKNOWN_PROCESS_BYTES
    found = process + int(available_bytes() * (1 - _RESERVED_SHARE)) // sharers
    given = None if memory_gib is None else int(memory_gib * GIB)
    is_given = given is not None and given <= found
    return Limits(
        host_bytes=given if given is not None and is_given else found,
        host_why="given by --memory" if is_given else "available",
        is_given=is_given,
        process_bytes=process,
        device_bytes=device_bytes,
        sharers=sharers,
    )
