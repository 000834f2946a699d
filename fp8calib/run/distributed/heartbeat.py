"""Heartbeats between the processes of a run, and the detection of a peer that has failed.

A thread sends this process's heartbeat through the store and checks the peers. When one has died,
hangs, or has reported an error, the thread interrupts the main thread and says why.
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
from typing import Any, TypeVar

from fp8calib.errors import Fp8CalibError, first_line

T = TypeVar("T")
BEAT_S = 1.0
POLL_S = 0.02
SILENT_S = 30.0
"""A process without a heartbeat for so long counts as dead."""
STUCK_S = 30.0
"""A main thread that does not react to an interruption for so long is blocked in C++."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerFailure:
    """Which process failed, and how."""

    rank: int
    why: str
    hint: str = ""
    kind: str | None = None
    """The kind of the error that the process reported; None where it died."""


class FailureDetector:
    """Sends the heartbeat of this process and checks those of its peers, in a thread.

    `abort` ends this process where the main thread cannot be interrupted.

    Attributes:
        failure: the failure that was found; None so far.
    """

    def __init__(
        self,
        store: Any,
        rank: int,
        peers: Collection[int],
        abort: Callable[[PeerFailure], None],
    ) -> None:
        self.failure: PeerFailure | None = None
        self._store = store
        self._rank = rank
        self._peers = tuple(peers)
        self._abort = abort
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Announce this process and start the thread."""
        self._beat(0)  # peers read the heartbeat of every process that is announced
        self._store.set(f"process/{self._rank}", f"{_host()} {os.getpid()}")
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and announce that this process has finished."""
        self._stopped.set()
        self._thread.join(timeout=2 * BEAT_S)
        try:
            self._store.set(f"finished/{self._rank}", "1")
        except RuntimeError:  # the process that holds the store has exited
            return

    def report(self, error: Fp8CalibError) -> None:
        """Report an error of this process to its peers."""
        report = {"why": error.message, "hint": error.hint, "kind": error.kind}
        self._store.set(f"error/{self._rank}", json.dumps(report))

    def await_notice(self, timeout_s: float) -> None:
        """Wait until each peer has read the reported error, has finished or was never started."""
        wait_until(lambda: all(map(self._has_noticed, self._peers)), timeout_s)

    def check_peers(self) -> PeerFailure | None:
        """Check all peers now."""
        try:
            return next(filter(None, map(self._check_peer, self._peers)), None)
        except RuntimeError as error:
            return _store_failure(error)

    def _run(self) -> None:
        number = 0
        while not self._stopped.wait(BEAT_S):
            number += 1
            try:
                self._beat(number)
            except RuntimeError as error:
                self.failure = _store_failure(error)
            else:
                self.failure = self.check_peers()
            if self.failure is not None and not self._stopped.is_set():
                _thread.interrupt_main(signal.SIGTERM)
                if not self._stopped.wait(STUCK_S):
                    self._abort(self.failure)
                return

    def _beat(self, number: int) -> None:
        self._store.set(f"heartbeat/{self._rank}", str(number))

    def _has_noticed(self, rank: int) -> bool:
        check = self._store.check
        has_ended = check([f"noticed/{rank}"]) or check([f"finished/{rank}"])
        return has_ended or not check([f"process/{rank}"])

    def _check_peer(self, rank: int) -> PeerFailure | None:
        store = self._store
        if store.check([f"error/{rank}"]):
            store.set(f"noticed/{self._rank}", "1")
            return PeerFailure(rank=rank, **json.loads(store.get(f"error/{rank}")))
        if store.check([f"finished/{rank}"]) or not store.check([f"process/{rank}"]):
            return None
        if _has_died(store.get(f"process/{rank}").decode()):
            # It may have finished, or reported an error, a moment ago.
            if store.check([f"finished/{rank}"]) or store.check([f"error/{rank}"]):
                return None
            return PeerFailure(rank=rank, why="its process has died")
        beat, now = store.get(f"heartbeat/{rank}"), time.monotonic()
        if rank not in self._last_beats or self._last_beats[rank][0] != beat:
            self._last_beats[rank] = (beat, now)
        if now - self._last_beats[rank][1] > SILENT_S:
            return PeerFailure(rank=rank, why=f"no heartbeat for {SILENT_S:.0f} s")
        return None


def wait_until(find: Callable[[], T], timeout_s: float) -> T:
    """Call a function until it finds something or the time is over; give its last answer."""
    until = time.monotonic() + timeout_s
    while not (found := find()) and time.monotonic() < until:
        time.sleep(POLL_S)
    return found


def _store_failure(error: RuntimeError) -> PeerFailure:
    return PeerFailure(rank=0, why=f"the connection to it broke ({first_line(error)})")


def _host() -> str:
    """Name the machine and the process namespace within which a process id is unique."""
    try:
        return f"{socket.gethostname()}:{Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return socket.gethostname()


def _has_died(process: str) -> bool:
    """Whether a process is dead; False if that is unknown (it runs on another machine)."""
    host, _, pid = process.rpartition(" ")
    if host != _host():
        return False
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return Path("/proc/self/stat").exists()
    return state in "ZX"
