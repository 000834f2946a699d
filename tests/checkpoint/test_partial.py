"""Two runs that want one folder: the second is told, unless the first has ended."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fp8calib.checkpoint import folder_lock
from fp8calib.checkpoint.folder_lock import shared_lock
from fp8calib.checkpoint.partial import PartialFolder
from fp8calib.errors import UsageError


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_lock, "_PATIENCE_S", 0.2)


def folder_of(path: Path, *, resume: bool = False) -> PartialFolder:
    return PartialFolder(path, owned=frozenset({"file"}), tag="test", resume=resume)


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
        pytest.raises(UsageError, match="another run is at work there"),
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


@contextmanager
def shared_after(folder: PartialFolder, staging: Path) -> Iterator[None]:
    folder.share()
    with shared_lock(staging):
        yield


def test_processes_of_one_run_hold_a_folder_together(tmp_path: Path) -> None:
    first = folder_of(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt), first, shared_after(first, tmp_path / "out.partial"):
        interrupt()
    again = folder_of(tmp_path / "out", resume=True)
    with (
        shared_lock(tmp_path / "out.partial"),
        pytest.raises(UsageError, match="another run"),
        again,
    ):
        pass
    with again as staging:
        assert staging.exists()


def test_where_there_is_no_folder_nothing_is_held(tmp_path: Path) -> None:
    with shared_lock(tmp_path / "elsewhere"):
        pass
