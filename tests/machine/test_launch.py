"""The place of a process, read from what its starter says."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from fp8calib.errors import UsageError
from fp8calib.machine.launch import ALONE, ProcessRank, find_process_rank, tell_starter

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29500",
}


def test_torchrun_says_it_all() -> None:
    place = find_process_rank(TORCHRUN)
    assert place == ProcessRank(rank=5, size=8, local_rank=1, local_size=4)
    assert not place.is_first


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"])
def test_a_variable_that_others_set_too_says_nothing_alone(missing: str) -> None:
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
def test_places_that_cannot_be_are_refused(change: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"cannot be|no number"):
        find_process_rank({**TORCHRUN, **change})


def test_the_starter_is_told_of_an_error_where_torchrun_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    tell_starter({"TORCHELASTIC_ERROR_FILE": str(path)}, "error: no such model")
    failure = ProcessFailure(local_rank=0, pid=1, exitcode=4, error_file=str(path))
    summary = ChildFailedError("fp8calib", {0: failure}).format_msg()
    assert "traceback : error: no such model" in summary
    tell_starter({"TORCHELASTIC_ERROR_FILE": ""}, "error")
    tell_starter({}, "error")
    assert [path] == list(tmp_path.iterdir())
