"""`calibrate` in several processes: the file is that of one process, a failed peer is named."""

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fp8calib.calibration import processes
from fp8calib.cli import program
from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import fail, succeed
from tests.kit.apart import start
from tests.kit.checkpoints import Tensors, change_tensors
from tests.kit.forks import paused, start_fork
from tests.kit.minutes import in_minutes

SIZE = ("--samples", 26, "--seq-len", 32, "--batch-size", 2, "--no-pack", "--dtype", "float32")


@pytest.fixture(autouse=True)
def _ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let forks not wait for the first process to print, and look at each other more often."""
    monkeypatch.setattr(processes, "_PRINT_S", 0.0)
    monkeypatch.setattr(processes, "_BEAT_S", 0.1)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    zoo.save("mixtral", folder)
    return folder


def make_rows(path: Path, count: int) -> Path:
    """Give rows of 2 to 32 tokens, so that batches are padded."""
    rows = [[3 + (i * j) % 90 for j in range(2 + i * 7 % 31)] for i in range(count)]
    return write_rows(path, [{"input_ids": row} for row in rows])


def find_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def start_ranks(
    count: int,
    *arguments: object,
    program: str = "fp8calib",
    last: AbstractContextManager[None] | None = None,
) -> list[subprocess.Popen[str]]:
    """Start the processes of a run one by one, the last of them in a context."""
    shared = share(count)
    started = [start_fork(program, *arguments, **shared, RANK=rank) for rank in range(count - 1)]
    with last or nullcontext():
        return [*started, start_fork(program, *arguments, **shared, RANK=count - 1)]


def share(count: int) -> dict[str, Any]:
    """Give the variables that all processes of a run have."""
    return {"WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": find_port()}


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


@pytest.mark.parametrize("by_torchrun", [False, *in_minutes(True)])
def test_any_number_of_processes_writes_the_same_file(
    mixtral: Path, tmp_path: Path, by_torchrun: bool
) -> None:
    rows = make_rows(tmp_path / "rows.jsonl", 26)
    command = ("calibrate", mixtral, "--data", rows, *SIZE, "--recipe", "w8a8-static", "--json")
    command = (*command, "--format", "kv-scales")
    alone = succeed(*command, "--out", tmp_path / "alone").json
    if by_torchrun:
        torchrun = ("torch.distributed.run", "--nproc-per-node", 2, "-m", "fp8calib")
        two = start(sys.executable, "-m", *torchrun, *command, "--out", tmp_path / "two")
    else:
        two, _ = start_ranks(2, *command, "--out", tmp_path / "two")
    code, out, err = finish(two)
    assert code == 0, err
    reports = {"two": json.loads(out)}
    four = start_ranks(4, *command, "--out", tmp_path / "four")
    for rank, process in enumerate(four):
        code, out, err = finish(process)
        assert code == 0, err
        if rank == 0:
            reports["four"] = json.loads(out)
            assert "4 processes share the data, with 1 threads each" in err
        else:
            assert (out, err) == ("", "")
    whole = (tmp_path / "alone" / "stats.safetensors").read_bytes()
    for name, count in (("two", 2), ("four", 4)):
        assert (tmp_path / name / "stats.safetensors").read_bytes() == whole
        assert reports[name]["ranks"] == count
        assert reports[name]["tokens"] == alone["tokens"]
        assert reports[name]["files"] == alone["files"]
        assert not list(tmp_path.glob(f"*{name}.*"))


def test_a_process_that_dies_ends_all_and_the_run_can_be_resumed(
    mixtral: Path, tmp_path: Path
) -> None:
    rows = make_rows(tmp_path / "rows.jsonl", 26)
    command = ("calibrate", mixtral, "--data", rows, *SIZE, "--format", "kv-scales")
    first, second = start_ranks(2, *command, "--out", tmp_path / "out", last=paused())
    partial = tmp_path / "out.partial"
    while not list(partial.glob("checkpoint-0*")):
        assert second.poll() is None, "ended before it had kept anything"
        time.sleep(0.02)
    second.kill()
    code, _, err = finish(first)
    finish(second)
    assert code == 6, err
    assert "error: another of 2 processes died" in err
    assert "--resume" in err
    assert not (tmp_path / "out").exists()
    resumed = succeed(*command, "--out", tmp_path / "out", "--resume", "--json").json
    assert resumed["resumed_sequences"] > 0
    succeed(*command, "--out", tmp_path / "whole")
    found, whole = (tmp_path / name / "stats.safetensors" for name in ("out", "whole"))
    assert found.read_bytes() == whole.read_bytes()


def read_process_id(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(next(line for line in process.stdout if line.startswith("pid "))[4:])


@pytest.mark.parametrize("others", ["compute", *in_minutes("values")])
def test_a_killed_process_ends_the_others_whatever_they_do(others: str) -> None:
    *alive, last = start_ranks(3, others, program="tests.calibration.program_killed")
    killed = time.monotonic()
    os.kill(read_process_id(last), signal.SIGKILL)
    finish(last)
    codes_and_lines = [finish(process)[:2] for process in alive]
    assert time.monotonic() - killed < 60
    assert [code for code, _ in codes_and_lines] == [6, 6]
    assert codes_and_lines[0][1].startswith("RankLostError: another of 3 processes died")
    assert codes_and_lines[1][1] == ""


def test_a_silent_process_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SILENT_S", 3.0)  # of the forks too
    first, last = start_ranks(2, "compute", program="tests.calibration.program_killed")
    os.kill(read_process_id(last), signal.SIGSTOP)
    try:
        code, out, _ = finish(first)
    finally:
        last.kill()
        finish(last)
    assert code == 6
    assert out == "RankLostError: another of 2 processes died, or was silent for 3 s\n"


@pytest.mark.parametrize("interrupted", [0, *in_minutes(1)])
def test_an_interruption_of_one_process_ends_all(interrupted: int) -> None:
    both = start_ranks(2, "compute", program="tests.calibration.program_killed")
    read_process_id(both[1])
    both[interrupted].send_signal(signal.SIGINT)
    ended = [finish(process)[:2] for process in both]
    assert ended[0] == (130, "KeyboardInterrupt: \n")
    assert ended[1][0] in {130, 6}  # the store through which it is told ends with the first


@pytest.mark.parametrize(("rank", "peer"), [(0, "the other processes"), (1, "rank 0")])
def test_a_process_without_peers_says_so(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, peer: str
) -> None:
    monkeypatch.setattr(processes, "SILENT_S", 0.4)  # of the fork too
    monkeypatch.setattr(program, "_FIRST_PRINTS_S", 0.1)
    rows = make_rows(tmp_path / "rows.jsonl", 26)
    command = ("calibrate", mixtral, "--data", rows, *SIZE, "--out", tmp_path / "out")
    code, _, err = finish(start_fork("fp8calib", *command, **share(2), RANK=rank))
    assert code == 6, err
    assert f"error: rank {rank} of 2 cannot reach {peer} at 127.0.0.1:" in err


def sleep_in_c(*_: Any, **__: Any) -> None:
    """Block where no Python signal handler runs."""
    print("stuck", flush=True)
    ctypes.CDLL(None).sleep(600)


def test_a_process_that_is_blocked_inside_torch_ends_too(
    mixtral: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They block where they exchange values."""
    monkeypatch.setattr(processes, "STUCK_S", 1.0)
    monkeypatch.setattr(processes.ProcessGroup, "broadcast", sleep_in_c)
    rows = make_rows(tmp_path / "rows.jsonl", 26)
    command = ("calibrate", mixtral, "--data", rows, *SIZE, "--out", tmp_path / "out")
    first, second = start_ranks(2, *command)
    for process in (first, second):
        assert process.stdout is not None
        assert process.stdout.readline() == "stuck\n"
    second.kill()
    code, _, err = finish(first)
    finish(second)
    assert code == 6, err
    assert "error: another of 2 processes died" in err


def test_the_error_of_any_process_is_printed_once_by_the_first(tmp_path: Path) -> None:
    """The last sequence, which rank 1 runs, holds a token whose embedding is NaN."""
    zoo.save("llama", tmp_path / "model")

    def spoil(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][99] = torch.nan

    change_tensors(tmp_path / "model", spoil)
    blind = tmp_path / "blind.yaml"
    blind.write_text("name: blind\nobserve: {weights: false}\n")
    short: list[Any] = [{"input_ids": [5, 6, 7]}] * 7
    rows = write_rows(tmp_path / "rows.jsonl", [*short, {"input_ids": [99, 99]}])
    size = ("--samples", 8, "--seq-len", 4, "--no-pack", "--dtype", "float32", "--recipe", blind)
    command = ("calibrate", tmp_path / "model", "--data", rows, *size, "--json")
    alone = start_fork("fp8calib", *command, "--out", tmp_path / "alone")
    shared = share(2)
    command = (*command, "--out", tmp_path / "out")
    first, second = (start_fork("fp8calib", *command, **shared, RANK=rank) for rank in (0, 1))
    code, out, err = finish(alone)
    assert code == 6, err
    message = json.loads(out)["error"]["message"]
    assert "at sample 7" in message
    code, out, err = finish(first)
    assert code == 6, err
    error = json.loads(out)["error"]
    assert (error["kind"], error["message"]) == ("calibration", f"rank 1 of 2: {message}")
    assert finish(second)[1] == ""
    assert not [path for name in ("out", "alone") for path in tmp_path.glob(f"*{name}*")]


def test_other_commands_refuse_several_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "::1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    told = fail(2, "quantize", tmp_path, "--scheme", "w8a16", "--out", "x")
    assert told.startswith("2 processes were started")
