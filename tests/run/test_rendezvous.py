"""Processes of a run that never come are named, before the meeting's end."""

from __future__ import annotations

import socket
import threading

import pytest
from torch.distributed import HashStore

from fp8calib.errors import CalibrationError
from fp8calib.machine.launch import ProcessRank
from fp8calib.run.distributed import rendezvous as meeting


def place(rank: int, size: int) -> ProcessRank:
    return ProcessRank(rank=rank, size=size, local_rank=rank, local_size=size)


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "MEETING_S", 0.2)


@pytest.mark.parametrize(("come", "who"), [((0, 2), "rank 1 of 3"), ((0,), "ranks 1, 2 of 3")])
def test_those_that_never_come_are_named(come: tuple[int, ...], who: str) -> None:
    store = HashStore()
    for rank in come:
        store.set(f"where/{rank}", "here")
    with pytest.raises(CalibrationError, match=f"^{who} did not come within 0 s"):
        meeting.meet(place(0, 3), store)


def test_all_go_on_when_the_last_has_come() -> None:
    store = HashStore()
    for rank in range(2):
        store.set(f"where/{rank}", "here")
    other = threading.Thread(target=meeting.meet, args=(place(1, 2), store), daemon=True)
    other.start()
    meeting.meet(place(0, 2), store)
    other.join(timeout=10)
    assert not other.is_alive()


def test_a_first_process_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(port))
    with pytest.raises(CalibrationError, match=f"^rank 1 of 2 cannot reach rank 0 at .*:{port}: "):
        meeting.open_store(place(1, 2))
