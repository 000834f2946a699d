"""Signs of life between the processes of one run, through the store they all reach.

A thread tells that its own process lives and looks after others. Where one has died, or has told
of an error, the main thread is interrupted and learns why.
"""

from __future__ import annotations

import _thread
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.errors import Fp8CalibError

BEAT_S = 1.0
SILENT_S = 30.0
"""A process that gives no sign of life for so long counts as dead."""
STUCK_S = 30.0
"""A main thread that does not react for so long is caught in C++, as a collective of nccl is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailure:
    """Why a run cannot go on."""

    rank: int
    why: str
    hint: str = ""
    kind: str | None = None
    """Of the error that the process told of; None where it died."""


class FailureDetector:
    """Watches some of the processes of a run while its thread is running.

    Args:
        store: what all processes reach.
        rank: of this process.
        watched: the ranks to look after.
        give_up: ends this process where the main thread cannot be interrupted.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        watched: Collection[int],
        give_up: Callable[[PeerFailure], None],
    ) -> None:
        self._store = store
        self._rank = rank
        self._watched = tuple(watched)
        self._give_up = give_up
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.lost: PeerFailure | None = None

    def start(self) -> None:
        """Tell where this process is, and begin."""
        self._beat(0)  # whoever is somewhere has a beat
        self._store.set(f"where/{self._rank}", f"{_describe_host()} {os.getpid()}")
        self._thread.start()

    def stop(self) -> None:
        """Tell that this process leaves in good order, and end."""
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)
        try:
            self._store.set(f"left/{self._rank}", "1")
        except RuntimeError:  # the process that keeps the store has left before
            return

    def tell(self, error: Fp8CalibError) -> None:
        """Tell the others of an error."""
        told = {"why": error.message, "hint": error.hint, "kind": error.kind}
        self._store.set(f"failed/{self._rank}", json.dumps(told))

    def look(self) -> PeerFailure | None:
        """Look after the others now."""
        try:
            return next(filter(None, map(self._look_after, self._watched)), None)
        except RuntimeError as error:
            return PeerFailure(
                rank=0, why=f"nothing is heard of it any more ({_first_line(error)})"
            )

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
            except RuntimeError as error:
                self.lost = PeerFailure(
                    rank=0, why=f"nothing is heard of it ({_first_line(error)})"
                )
            else:
                self.lost = self.look()
            if self.lost is not None and not self._stopped.is_set():
                _thread.interrupt_main(signal.SIGTERM)
                if not self._stopped.wait(STUCK_S):
                    self._give_up(self.lost)
                return

    def _beat(self, number: int) -> None:
        self._store.set(f"alive/{self._rank}", str(number))

    def _look_after(self, rank: int) -> PeerFailure | None:
        store = self._store
        if store.check([f"failed/{rank}"]):
            return PeerFailure(rank=rank, **json.loads(store.get(f"failed/{rank}")))
        if store.check([f"left/{rank}"]) or not store.check([f"where/{rank}"]):
            return None
        if _is_gone(store.get(f"where/{rank}").decode()):
            # It may have left, or told of an error, a moment ago.
            if store.check([f"left/{rank}"]) or store.check([f"failed/{rank}"]):
                return None
            return PeerFailure(rank=rank, why="its process has died")
        beat, now = store.get(f"alive/{rank}"), time.monotonic()
        if rank not in self._seen or self._seen[rank][0] != beat:
            self._seen[rank] = (beat, now)
        if now - self._seen[rank][1] > SILENT_S:
            return PeerFailure(rank=rank, why=f"no sign of life for {SILENT_S:.0f} s")
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _describe_host() -> str:
    """Name machine and process namespace: only there a process id means anything."""
    try:
        return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _is_gone(where: str) -> bool:
    """Whether a process of this machine is there no more; one of another is never known to be."""
    host, _, pid = where.rpartition(" ")
    if host != _describe_host():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self/stat").exists()
    return state in "ZX"
