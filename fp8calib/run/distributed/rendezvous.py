"""Connect the processes of a run. An error names a process that did not connect."""

from __future__ import annotations

import os
import socket
import time
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import TCPStore

from fp8calib.errors import CalibrationError, first_line
from fp8calib.machine.process_rank import ProcessRank
from fp8calib.run.distributed.heartbeat import POLL_S

RENDEZVOUS_S = 40.0
"""A process that has not started by then counts as dead. No weight is loaded before all processes
have started."""
_CONNECT_S = 5.0
START_HINT = (
    "start all processes at about the same time, with torchrun; do not set RANK and WORLD_SIZE by "
    "hand"
)
_COMPLETE_KEY = "rendezvous"


def connect_store(process_rank: ProcessRank) -> Any:
    """Connect to the store that all processes reach: torchrun's, or that of the first process.

    Raises:
        CalibrationError: it cannot be reached.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    is_of_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    is_server = process_rank.is_first and not is_of_torchrun
    try:
        if not is_server:
            _await_listener(address, port)
        return TCPStore(
            address,
            port,
            process_rank.size,
            is_master=is_server,
            timeout=timedelta(seconds=RENDEZVOUS_S),
            wait_for_workers=False,
            multi_tenant=True,
        )
    except (RuntimeError, ValueError, OSError, OverflowError) as error:
        server = "torchrun's store" if is_of_torchrun else "rank 0"
        peer = "the other processes" if is_server else server
        raise CalibrationError(
            f"rank {process_rank.rank} of {process_rank.size} cannot reach {peer} at "
            f"{address}:{port}: {first_line(error)}",
            hint=START_HINT,
        ) from error


def _await_listener(address: str, port: int) -> None:
    """Wait until a process listens; torch waits in C++, which no signal interrupts."""
    until = time.monotonic() + RENDEZVOUS_S
    while True:
        try:
            socket.create_connection((address, port), timeout=_CONNECT_S).close()
        except OSError:
            if time.monotonic() > until:
                raise
            time.sleep(POLL_S)
        else:
            return


def rendezvous(process_rank: ProcessRank, store: Any) -> None:
    """Wait until all processes have started; the first one reports those that have not.

    Raises:
        CalibrationError: some have not started; the message names them.
    """
    if not process_rank.is_first:
        wait_for_keys(store, _COMPLETE_KEY)
        return
    until = time.monotonic() + RENDEZVOUS_S
    ranks = range(process_rank.size)
    while missing := [rank for rank in ranks if not store.check([f"process/{rank}"])]:
        if time.monotonic() > until:
            names = f"rank{'s'[: len(missing) - 1]} {', '.join(map(str, missing))}"
            raise CalibrationError(
                f"{names} of {process_rank.size} did not start within {RENDEZVOUS_S:.0f} s",
                hint=f"see whether it died or was never started. {START_HINT}",
            )
        time.sleep(POLL_S)
    store.set(_COMPLETE_KEY, "1")


def wait_for_keys(store: Any, *keys: str) -> None:
    """Wait for keys in the store; a signal interrupts it, unlike the store's own wait."""
    while not store.check([*keys]):
        time.sleep(POLL_S)
