"""The rank of a process, read from the environment that torchrun sets."""

from __future__ import annotations

import pytest

from fp8calib.errors import UsageError
from fp8calib.machine import ALONE, ProcessRank, find_process_rank

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_all_variables_of_torchrun_are_read() -> None:
    process_rank = find_process_rank(TORCHRUN)
    assert process_rank == ProcessRank(rank=5, size=8, local_rank=1, local_size=4)
    assert not process_rank.is_first


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_one_process_where_a_variable_is_missing(missing: str) -> None:
    assert find_process_rank({**TORCHRUN, missing: ""}) == ALONE
    assert find_process_rank({}) == ALONE
    assert ALONE.is_first


def test_without_local_variables_all_are_on_one_machine() -> None:
    environment = {key: value for key, value in TORCHRUN.items() if "LOCAL" not in key}
    assert find_process_rank(environment) == ProcessRank(rank=5, size=8, local_rank=5, local_size=8)


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "8"},
        {"RANK": "-1"},
        {"RANK": "x"},
        {"MASTER_PORT": "x"},
        {"MASTER_PORT": "65536"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "9", "LOCAL_RANK": "0"},
    ],
)
def test_contradicting_variables_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"contradict each other|not a port|not a number"):
        find_process_rank({**TORCHRUN, **change})
