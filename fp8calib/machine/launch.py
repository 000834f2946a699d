"""With how many others a process was started: what torchrun and its like put into the environment.

Nothing heavy is imported for it, since every command asks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fp8calib.errors import UsageError

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PORTS = 2**16


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessRank:
    """Which of several processes this one is."""

    rank: int
    size: int
    local_rank: int
    """Among those on this machine."""
    local_size: int

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes and talks."""
        return self.rank == 0


ALONE = ProcessRank(rank=0, size=1, local_rank=0, local_size=1)


def find_process_rank(environment: Mapping[str, str]) -> ProcessRank:
    """Read one's place; `ALONE` where nothing says that there are others.

    Raises:
        UsageError: a variable holds no number, or numbers that contradict each other.
    """
    if not all(environment.get(name) for name in _NEEDED):
        return ALONE
    rank, size, port = (
        _read(environment, name, 0) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT")
    )
    if port >= _PORTS:
        raise UsageError(f"MASTER_PORT={port}: cannot be", hint="start all processes with torchrun")
    place = ProcessRank(
        rank=rank,
        size=size,
        local_rank=_read(environment, "LOCAL_RANK", rank),
        local_size=_read(environment, "LOCAL_WORLD_SIZE", size),
    )
    if not (0 <= rank < size and 0 <= place.local_rank < place.local_size <= size):
        raise UsageError(
            f"RANK {rank}, WORLD_SIZE {size}, LOCAL_RANK {place.local_rank} and LOCAL_WORLD_SIZE "
            f"{place.local_size} cannot be",
            hint="start all processes with torchrun, or unset these variables",
        )
    return place


def tell_starter(environment: Mapping[str, str], message: str) -> None:
    """Leave an error where torchrun's own summary takes it from; nobody else asks for it."""
    path = environment.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return
    extra = {"py_callstack": message, "timestamp": str(int(time.time()))}
    with suppress(OSError):
        Path(path).write_text(json.dumps({"message": {"message": message, "extraInfo": extra}}))


def _read(environment: Mapping[str, str], name: str, default: int) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name}={text}: no number", hint="start all processes with torchrun")
    return int(text)
