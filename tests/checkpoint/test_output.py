"""Atomic folders and files: complete or absent, whatever fails."""

import errno
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

import pytest

from fp8calib.checkpoint.output import (
    check_output,
    check_output_file,
    output_folder,
    require_free_space,
    write_file_atomic,
)
from fp8calib.errors import ExportError, UsageError

OWNED = frozenset({"stats", "tree"})


def _list_tree(folder: Path) -> dict[str, str]:
    """Map every file below a folder, hidden ones too, to its text, and folders to ''."""
    return {
        str(path.relative_to(folder)): path.read_text() if path.is_file() else ""
        for path in sorted(folder.rglob("*"))
    }


def _fill(folder: Path, text: str = "new") -> None:
    (folder / "stats").write_text(text)
    (folder / "tree").mkdir()
    (folder / "tree" / "leaf").write_text(text)


def _write(path: Path, *, force: bool = False, text: str = "new") -> None:
    with output_folder(path, owned=OWNED, force=force) as folder:
        _fill(folder, text)


def _write_and_raise(path: Path, error: type[BaseException]) -> None:
    with output_folder(path, owned=OWNED, force=True) as folder:
        _fill(folder)
        raise error("stop")


def _write_while_another_fills(path: Path) -> None:
    with output_folder(path, owned=OWNED, force=True) as folder:
        _fill(folder)
        path.mkdir()
        (path / "theirs").write_text("x")


def _write_more_than_a_megabyte(path: Path) -> None:
    with output_folder(path, owned=OWNED) as folder:
        for name in "abcdefghijkl":
            (folder / name).write_bytes(bytes(100_000))


FILLED = {"stats": "new", "tree": "", "tree/leaf": "new"}


@pytest.fixture
def refuse_rename(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Give a function that lets the n-th rename from now on fail."""
    real = Path.rename

    def arm(failing: int) -> None:
        calls = iter(range(1, 100))

        def rename(self: Path, target: Path) -> Path:
            if next(calls) == failing:
                raise OSError(errno.EIO, "Input/output error", str(self))
            return real(self, target)

        monkeypatch.setattr(Path, "rename", rename)

    return arm


def test_a_new_folder_appears_whole_with_its_parents(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "out"
    with output_folder(path, owned=OWNED) as folder:
        assert folder.parent == path.parent
        assert folder.name == ".out.fp8calib-tmp"
        _fill(folder)
        assert not path.exists()

    assert _list_tree(path) == FILLED
    assert [entry.name for entry in path.parent.iterdir()] == ["out"]


def test_an_existing_empty_folder_is_accepted_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.mkdir(mode=0o750)
    _write(path)

    assert _list_tree(path) == FILLED
    assert stat.S_IMODE(path.stat().st_mode) == 0o750


@pytest.mark.parametrize("force", [True, False])
def test_a_folder_that_holds_anything_else_is_refused_even_with_force(
    tmp_path: Path, force: bool
) -> None:
    path = tmp_path / "out"
    _write(path, text="old")
    (path / "thesis.tex").write_text("years of work")
    before = _list_tree(tmp_path)

    with pytest.raises(UsageError, match=r"does not write: thesis\.tex"):
        _write(path, force=force)

    assert _list_tree(tmp_path) == before


def test_force_stays_in_a_folder_that_holds_what_json_printed(tmp_path: Path) -> None:
    """Of other JSON files the folder is another program's."""
    _write(tmp_path, text="old")
    (tmp_path / "printed.json").write_text('{"schema_version": 1, "passed": true}')
    _write(tmp_path, force=True)
    assert _list_tree(tmp_path)["tree/leaf"] == "new"
    for name, text in (("printed.txt", '{"schema_version": 1}'), ("own.json", "[1]")):
        (tmp_path / name).write_text(text)
        with pytest.raises(UsageError, match=f"does not write: {name}"):
            _write(tmp_path, force=True)
        (tmp_path / name).unlink()


def test_force_leaves_an_owned_entry_that_the_run_does_not_write(tmp_path: Path) -> None:
    path = tmp_path / "out"
    _write(path, text="old")
    with output_folder(path, owned=OWNED, force=True) as folder:
        (folder / "stats").write_text("new")

    assert _list_tree(path) == {"stats": "new", "tree": "", "tree/leaf": "old"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_file_in_the_way_is_refused(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("x")
    with pytest.raises(UsageError, match="a file, not a folder"):
        _write(tmp_path / "out", force=True)
    with pytest.raises(UsageError, match="is not a folder"):
        _write(tmp_path / "out" / "below")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, ExportError])
@pytest.mark.parametrize("exists", [True, False])
def test_an_exception_leaves_nothing_behind_and_is_not_changed(
    tmp_path: Path, error: type[BaseException], exists: bool
) -> None:
    path = tmp_path / "a" / "out"
    if exists:
        path.mkdir(parents=True)
        _write(path, text="old")
    before = _list_tree(tmp_path)

    with pytest.raises(error, match="stop"):
        _write_and_raise(path, error)

    assert _list_tree(tmp_path) == before


@pytest.mark.parametrize("failing", [1, 2])
def test_a_failing_exchange_restores_the_old_folder(
    tmp_path: Path, refuse_rename: Callable[[int], None], failing: int
) -> None:
    path = tmp_path / "out"
    _write(path, text="old")
    before = _list_tree(tmp_path)
    refuse_rename(failing)

    with pytest.raises(ExportError, match="Input/output error"):
        _write(path, force=True)

    assert _list_tree(tmp_path) == before


def test_a_mount_point_and_the_working_directory_are_refused(
    tmp_path: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for path in (small_disk, Path(), tmp_path / "here"):
        with pytest.raises(UsageError, match="a mount point or the working directory") as caught:
            _write(path)
        assert f"such as {path / 'out'}" in caught.value.hint
    _write(small_disk / "out")
    _write(Path("out"))


def test_a_link_to_a_folder_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    _write(tmp_path / "out")

    assert (tmp_path / "out").is_symlink()
    assert _list_tree(tmp_path / "real") == FILLED


_KILLED = """
import os, signal, sys
from pathlib import Path
from fp8calib.checkpoint.output import output_folder
with output_folder(Path(sys.argv[1]), owned=frozenset({"stats"})) as folder:
    (folder / "stats").write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_run_leaves_nothing_after_the_next(tmp_path: Path) -> None:
    """What other outputs have stays."""
    path = tmp_path / "out"
    for name in (".out.tmp-0123abcd", ".another.fp8calib-tmp", "out.fp8calib-tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "stats").write_text("x")
    kept = _list_tree(tmp_path)
    done = subprocess.run([sys.executable, "-c", _KILLED, str(path)], check=False)
    assert done.returncode == -signal.SIGKILL
    assert len(_list_tree(tmp_path)) == len(kept) + 2
    _write(path)

    assert _list_tree(tmp_path) == {
        **kept,
        "out": "",
        **{f"out/{name}": text for name, text in FILLED.items()},
    }


def test_a_run_killed_between_two_renames_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    _write(path, text="old")
    before = _list_tree(tmp_path)
    path.rename(tmp_path / ".out.fp8calib-old")
    with pytest.raises(UsageError, match="not empty"):
        _write(path)
    assert _list_tree(tmp_path) == before

    path.rename(tmp_path / ".out.fp8calib-old")
    _write(path, force=True, text="newer")
    assert _list_tree(path)["stats"] == "newer"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_a_folder_filled_by_someone_else_meanwhile_is_not_replaced(tmp_path: Path) -> None:
    path = tmp_path / "out"
    with pytest.raises(UsageError, match="does not write: theirs"):
        _write_while_another_fills(path)

    assert _list_tree(tmp_path) == {"out": "", "out/theirs": "x"}


def test_a_run_that_waited_for_another_one_does_not_begin(tmp_path: Path) -> None:
    """The other one ends between the look at the folder and the lock."""
    path, began = tmp_path / "out", []

    def wait() -> None:
        with (
            pytest.raises(UsageError, match="not empty"),
            output_folder(path, owned=OWNED, tag="run"),
        ):
            began.append(True)

    second = Thread(target=wait)
    with output_folder(path, owned=OWNED, tag="run") as folder:
        _fill(folder)
        second.start()
        time.sleep(0.5)  # it looks at the folder, and waits
    second.join()
    assert not began
    assert [each.name for each in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("path", ["a\0b", "x" * 300, "loop/out"])
def test_an_impossible_path_is_a_usage_error(tmp_path: Path, path: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UsageError):
        check_output(tmp_path / path, OWNED, False)
    with pytest.raises(UsageError):
        check_output_file(tmp_path / path)


def test_a_disk_that_fills_up_leaves_nothing_behind(small_disk: Path) -> None:
    path = small_disk / "a" / "out"
    with pytest.raises(ExportError) as caught:
        _write_more_than_a_megabyte(path)

    assert str(path) in caught.value.message
    assert "No space left on device" in caught.value.message
    assert list(small_disk.iterdir()) == []


def test_a_failing_write_keeps_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "x").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(ExportError, match="more than 3 bytes are needed"):
        write_file_atomic(tmp_path / "x", b"new")
    with pytest.raises(ExportError):
        write_file_atomic(tmp_path / "a" / "b" / "x", b"new")

    assert _list_tree(tmp_path) == {"x": "old"}


def test_a_folder_or_a_device_is_never_replaced_by_a_file(tmp_path: Path) -> None:
    for path in (tmp_path, Path("/dev/null")):
        with pytest.raises(UsageError, match="exists, and is not a regular file"):
            write_file_atomic(path, b"x")
    assert Path("/dev/null").is_char_device()


def test_free_space_is_asked_of_the_disk_the_path_will_lie_on(small_disk: Path) -> None:
    require_free_space(small_disk / "a" / "b", 900_000)
    with pytest.raises(ExportError) as caught:
        require_free_space(small_disk / "a" / "b", 1_100_000)

    assert caught.value.message == (
        f"{small_disk / 'a' / 'b'}: 1.1 MB are needed and 1.0 MB are free on its disk"
    )
    assert list(small_disk.iterdir()) == []
