"""The rank of this process among those started together, from the environment torchrun sets.

Every command reads it, so nothing heavy is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fp8calib.errors import UsageError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRank:
    """The rank of this process among those of a run."""

    rank: int
    size: int
    local_rank: int
    """The rank among the processes on this machine."""
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this process writes the output and prints messages."""
        return self.rank == 0


ALONE = ProcessRank(rank=0, size=1, local_rank=0, local_size=1)


def find_process_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Read the rank from the environment; `ALONE` where a variable is missing.

    Raises:
        UsageError: a variable is not a number, or the numbers contradict each other.
    """
    if not all(environment.get(name) for name in _NEEDED):
        return ALONE
    rank, size, port = (
        _read(environment, name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if port >= _PORTS:
        raise UsageError(
            f"MASTER_PORT={port}: not a port", hint="start all processes with torchrun"
        )
    found = ProcessRank(
        rank=rank,
        size=size,
        local_rank=_read(environment, "LOCAL_RANK", rank),
        local_size=_read(environment, "LOCAL_WORLD_SIZE", size),
    )
    if not (0 <= rank < size and 0 <= found.local_rank < found.local_size <= size):
        raise UsageError(
            f"RANK {rank}, WORLD_SIZE {size}, LOCAL_RANK {found.local_rank} and LOCAL_WORLD_SIZE "
            f"{found.local_size} contradict each other",
            hint="start all processes with torchrun, or unset these variables",
        )
    return found


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: not a number", hint="start all processes with torchrun")
    return int(text)
