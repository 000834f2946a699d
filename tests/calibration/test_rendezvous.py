"""Processes that never start are named when the rendezvous times out."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import HashStore

from fp8calib.calibration import processes
from fp8calib.errors import CalibrationError
from fp8calib.machine import ProcessRank


def process(rank: int, size: int) -> ProcessRank:
    return ProcessRank(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "RENDEZVOUS_S", 0.2)


@pytest.mark.parametrize(("started", "names"), [((0, 2), "rank 1 of 3"), ((0,), "ranks 1, 2 of 3")])
def test_processes_that_never_start_are_named(started: tuple[int, ...], names: str) -> None:
    store = HashStore()
    for rank in started:
        store.add(f"here/{rank}", 1)
    with pytest.raises(CalibrationError, match=f"^{names} did not start within 0 s"):
        processes.rendezvous(process(0, 3), store)


def test_all_continue_when_the_last_has_started() -> None:
    store = HashStore()
    for rank in range(2):
        store.add(f"here/{rank}", 1)
    other = threading.Thread(target=processes.rendezvous, args=(process(1, 2), store), daemon=True)
    other.start()
    processes.rendezvous(process(0, 2), store)
    other.join(timeout=10)
    assert not other.is_alive()


def test_a_first_process_that_never_starts_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(CalibrationError, match=f"^rank 1 of 2 cannot reach rank 0 at .*:{port}: "):
        processes.connect(process(1, 2))
