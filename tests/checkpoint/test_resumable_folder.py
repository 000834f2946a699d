"""A later run continues an interrupted one; two runs never use a folder at the same time."""

import json
import multiprocessing
import os
import signal
import time
from contextlib import AbstractContextManager
from pathlib import Path
from unittest.mock import patch

import pytest

from fp8calib.checkpoint import output
from fp8calib.checkpoint.output import PROGRESS_NAME, output_folder
from fp8calib.errors import RESUMABLE, ExportError, UsageError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "LOCK_TIMEOUT_S", 0.2)


def folder_of(path: Path, *, resume: bool = False) -> AbstractContextManager[Path]:
    return output_folder(path, owned=frozenset({"file"}), tag="test", resume=resume)


def work(path: Path) -> None:
    """Hold a folder until killed."""
    with folder_of(path) as staging:
        (staging / "begun").touch()
        time.sleep(60)


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_that_another_process_works_in_is_refused(tmp_path: Path, resume: bool) -> None:
    context = multiprocessing.get_context("fork")
    other = context.Process(target=work, args=(tmp_path / "out",))
    other.start()
    begun = tmp_path / "out.partial" / "begun"
    while not begun.exists():
        time.sleep(0.01)
    with (
        pytest.raises(UsageError, match="another run is using this folder"),
        folder_of(tmp_path / "out", resume=resume),
    ):
        pass
    assert begun.exists()
    other.kill()
    other.join()
    with folder_of(tmp_path / "out", resume=resume) as staging:
        assert begun.exists() == resume
        (staging / "file").touch()
        begun.unlink(missing_ok=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_an_interrupted_run_lets_go(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), folder_of(tmp_path / "out"):
        interrupt()
    with folder_of(tmp_path / "out", resume=True) as staging:
        (staging / "file").touch()
    assert (tmp_path / "out" / "file").exists()


def interrupt() -> None:
    raise KeyboardInterrupt


def test_what_cannot_be_put_in_place_waits_for_resume(tmp_path: Path) -> None:
    """Somebody puts a file where the output goes, while the run works."""
    out = tmp_path / "out"

    def write_while_another_does() -> None:
        with folder_of(out) as staging:
            (staging / "file").write_text("hours")
            out.mkdir()
            (out / "precious").touch()

    with pytest.raises(UsageError, match="does not write") as refused:
        write_while_another_does()
    assert f"the output is kept in {tmp_path / 'out.partial'}" in refused.value.hint
    (out / "precious").unlink()
    with folder_of(out, resume=True) as staging:
        assert (staging / "file").read_text() == "hours"
    assert [path.name for path in out.iterdir()] == ["file"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def finish_and_die(path: Path, moment: str) -> None:
    """Write a folder, and die where it is put in place."""
    with patch(moment, lambda *_, **__: kill()), folder_of(path) as staging:
        (staging / "file").write_text("hours")


@pytest.mark.parametrize("moment", ["pathlib.Path.rename", "pathlib.Path.unlink"])
def test_a_run_killed_at_its_very_end_can_be_gone_on_with(tmp_path: Path, moment: str) -> None:
    """Killed before the folder is renamed, or before its progress file is removed."""
    out = tmp_path / "out"
    with folder_of(tmp_path / "warm") as staging:  # what is imported late, is now
        (staging / "file").touch()
    context = multiprocessing.get_context("fork")
    other = context.Process(target=finish_and_die, args=(out, moment))
    other.start()
    other.join()
    assert other.exitcode == -signal.SIGKILL
    if moment.endswith("rename"):
        with folder_of(out, resume=True) as staging:
            assert (staging / "file").read_text() == "hours"
    else:
        (out / PROGRESS_NAME).unlink()
    assert [path.name for path in out.iterdir()] == ["file"]


def test_a_mark_that_was_never_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / PROGRESS_NAME).touch()
    with folder_of(tmp_path / "out", resume=True) as staging:
        assert json.loads((staging / PROGRESS_NAME).read_bytes()) == {"tag": "test"}
        (staging / "file").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_place_that_holds_no_folders_is_named() -> None:
    place = Path("/proc/fp8calib")
    message = r"/proc/fp8calib: cannot be written: No such file or directory"
    with pytest.raises(ExportError, match=message), folder_of(place):
        pass


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.unfinished"])
def test_an_interrupted_run_is_kept_where_something_is_saved(tmp_path: Path, name: str) -> None:
    def save_and_interrupt() -> None:
        with folder_of(tmp_path / "out") as staging:
            (staging / name).touch()
            interrupt()

    with pytest.raises(KeyboardInterrupt) as interruption:
        save_and_interrupt()
    is_saved = name.endswith(".safetensors")
    assert getattr(interruption.value, "__notes__", []) == [RESUMABLE] * is_saved
    assert [path.name for path in tmp_path.iterdir()] == ["out.partial"] * is_saved
