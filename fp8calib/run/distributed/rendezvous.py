"""How the processes of one run find each other, and which of them never come."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from fp8calib.errors import CalibrationError
from fp8calib.machine.launch import ProcessRank

MEETING_S = 40.0
"""Who begins so much later than the others counts as dead; no weight is loaded before."""
POLL_S = 0.02
_CONNECT_S = 5.0
START_HINT = (
    "start all processes about at once, with torchrun; do not set RANK and WORLD_SIZE by hand"
)
_MET_KEY = "met"


def open_store(place: ProcessRank) -> Any:
    """Open the store that all reach: the one torchrun keeps, or the first process's own.

    Raises:
        CalibrationError: it cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    keeps = place.is_first and not is_kept
    try:
        if not keeps:
            _await_listener(address, port)
        return TCPStore(
            address,
            port,
            place.size,
            is_master=keeps,
            timeout=timedelta(seconds=MEETING_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        who = "the others" if keeps else "torchrun's store" if is_kept else "rank 0"
        raise CalibrationError(
            f"rank {place.rank} of {place.size} cannot reach {who} at {address}:{port}: "
            f"{str(error).splitlines()[0]}",
            hint=START_HINT,
        ) from error


def _await_listener(address: str, port: int) -> None:
    """Wait for somebody to listen; torch's own waiting can be interrupted by nobody."""
    until = time.monotonic() + MEETING_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
        else:
            return


def meet(place: ProcessRank, store: Any) -> None:
    """Wait until all processes have told where they are; the first decides that one never will.

    Raises:
        CalibrationError: one has not come; the message says which.
    """
    if not place.is_first:
        wait_for(store, _MET_KEY)
        return
    until = time.monotonic() + MEETING_S
    while missing := [rank for rank in range(place.size) if not store.check([f"where/{rank}"])]:
        if time.monotonic() > until:
            who = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing))}"
            raise CalibrationError(
                f"{who} of {place.size} did not come within {MEETING_S:.0f} s: dead, or never "
                "started",
                hint=f"look for what ended it. {START_HINT}",
            )
        time.sleep(POLL_S)
    store.set(_MET_KEY, "1")


def wait_for(store: Any, *keys: str) -> None:
    """Wait for keys in the store; an interruption ends it, which waiting in C++ would not."""
    while not store.check([*keys]):
        time.sleep(POLL_S)
