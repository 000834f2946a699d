"""`calibrate --resume` after a process was interrupted or killed."""

import json
import shlex
import signal
import time
from pathlib import Path

import pytest

from fp8calib.commands import calibrate_run
from fp8calib.errors import ExportError
from tests.cli.conftest import QUICK, write_rows
from tests.cli.program import fail, snapshot, succeed
from tests.kit.forks import paused, start_fork

LONG = ("--samples", 40, "--seq-len", 64, "--dtype", "float32", "--format", "kv-scales")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    return write_rows(
        path, [{"input_ids": [3 + (i * j) % 90 for j in range(64)]} for i in range(40)]
    )


@pytest.fixture(scope="module")
def whole(model: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """Give the statistics of an uninterrupted run."""
    out = tmp_path_factory.mktemp("whole") / "out"
    succeed("calibrate", model, "--data", rows, *LONG, "--out", out)
    return (out / "stats.safetensors").read_bytes()


def test_an_interrupted_run_prints_the_command_that_resumes(
    model: Path, rows: Path, whole: bytes, tmp_path: Path
) -> None:
    out = tmp_path / "it's an $out" / "out"  # what a shell has to have quoted
    out.parent.mkdir()
    with paused():
        process = start_fork(
            *("fp8calib", "calibrate", model, "--data", rows, *LONG, "--out", out, "--json")
        )
    while not list(out.with_name("out.partial").glob("checkpoint-0*.safetensors")):
        assert process.poll() is None, "ended before it had kept anything"
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    text, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    error = json.loads(text)["error"]
    assert (error["kind"], error["message"]) == ("calibration", "interrupted")
    assert "Traceback" not in err
    words = shlex.split(error["hint"].removeprefix("resume with: "))
    assert words[0] == "fp8calib"
    outcome = succeed(*words[1:])
    assert (out / "stats.safetensors").read_bytes() == whole
    assert 0 < outcome.json["resumed_sequences"] < 40
    tokens = 64 * (40 - outcome.json["resumed_sequences"])  # not those that the first run saw
    assert outcome.json["tokens_per_s"] == pytest.approx(tokens / outcome.json["duration_s"])
    now = f"{40 - outcome.json['resumed_sequences']} of them now"
    assert f"2,560 tokens in 40 sequences, {now}, " in outcome.err
    before = snapshot(out)
    again = succeed(*words[1:])
    assert (again.json, snapshot(out)) == (outcome.json, before)


# --- without a run that was ended --------------------------------------------------------------


def test_resume_without_a_checkpoint_starts_from_the_beginning(
    model: Path, data: Path, tmp_path: Path
) -> None:
    command = ("calibrate", model, "--data", data, *QUICK)
    outcome = succeed(*command, "--out", tmp_path / "resumed", "--resume", "--json")
    assert outcome.json["resumed_sequences"] == 0
    assert "starting from the beginning" in outcome.err
    succeed(*command, "--out", tmp_path / "plain")
    stats = [(tmp_path / name / "stats.safetensors").read_bytes() for name in ("resumed", "plain")]
    assert stats[0] == stats[1]


def test_a_folder_of_other_origin_is_not_touched(model: Path, data: Path, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "precious.txt").write_text("mine")
    command = ("calibrate", model, "--data", data, *QUICK, "--out", tmp_path / "out")
    for resume in ((), ("--resume",)):
        assert "the folder is not empty, and was not made by an interrupted run" in fail(
            2, *command, *resume
        )
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"]


def test_a_run_that_only_failed_to_move_its_output_is_not_repeated(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    command = ("calibrate", model, "--data", data, *QUICK, "--out", out)
    show, seen = calibrate_run._make_result, []

    def build(*arguments: object, **options: object) -> object:
        out.mkdir(exist_ok=True)
        (out / "precious").touch()
        seen.append(1)
        return show(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(calibrate_run, "_make_result", build)
    assert "the output is kept in" in fail(2, *command)
    (out / "precious").unlink()
    outcome = succeed(*command, "--resume", "--json")
    assert "is finished already" in outcome.err
    assert len(seen) == 1
    assert {path.name for path in out.iterdir()} == set(outcome.json["files"]) - {
        name for name in outcome.json["files"] if "/" in name
    } | {"kv-overlay"}
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_failure_to_write_the_output_keeps_the_checkpoints(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("calibrate", model, "--data", data, *QUICK, "--out", tmp_path / "out")

    def refuse(*_: object) -> None:
        raise ExportError("the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(calibrate_run, "save_stats", refuse)
        assert "the disk is full" in fail(7, *command)
        assert not list(tmp_path.iterdir())  # nothing was kept of so short a run
        patched.setattr("fp8calib.calibration.journal.INTERVAL_S", 0.0)
        assert "fix the cause, then use --resume" in fail(7, *command)
    assert list((tmp_path / "out.partial").glob("checkpoint-*"))
    assert succeed(*command, "--resume", "--json").json["resumed_sequences"] == 4
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_run_without_resume_or_force_discards_nothing(
    model: Path, data: Path, tmp_path: Path
) -> None:
    command = ("calibrate", model, "--data", data, *QUICK, "--out", tmp_path / "out")
    partial = tmp_path / "out.partial"
    partial.mkdir()
    (partial / "fp8calib-partial.json").write_text('{"tag": "fp8calib calibrate"}')
    (partial / "checkpoint-00000000.safetensors").write_bytes(b"hours")
    assert f"{partial}: an interrupted run is kept here" in fail(2, *command)
    assert (partial / "checkpoint-00000000.safetensors").read_bytes() == b"hours"
    succeed(*command, "--force")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
