"""Several output files: all or none appear."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fp8calib.checkpoint.output_files import output_files, probe_output_files
from fp8calib.errors import ExportError, UsageError


def test_all_files_appear_at_the_end_and_replace_what_was_there(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("old")
    with output_files([one, other]) as places:
        places[one].write_text("1")
        places[other].write_text("2")
        assert one.read_text() == "old"
        assert not other.exists()
    assert (one.read_text(), other.read_text()) == ("1", "2")
    assert sorted(os.listdir(tmp_path)) == ["one", "other"]  # noqa: PTH208


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_after_an_error_nothing_has_changed(tmp_path: Path, error: type[BaseException]) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    one.write_text("old")
    with pytest.raises(error):  # noqa: PT012, SIM117 -- it is the block that fails
        with output_files([one, other]) as places:
            places[one].write_text("1")
            raise error
    assert one.read_text() == "old"
    assert os.listdir(tmp_path) == ["one"]  # noqa: PTH208


def test_a_missing_folder_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(ExportError),
        output_files([tmp_path / "one", tmp_path / "no" / "other"]),
    ):
        pass
    assert os.listdir(tmp_path) == []  # noqa: PTH208


def test_probing_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("old")
    probe_output_files([tmp_path / "one", tmp_path / "other"])
    assert (tmp_path / "one").read_text() == "old"
    assert os.listdir(tmp_path) == ["one"]  # noqa: PTH208


@pytest.mark.parametrize("name", ["no/other", "x" * 256])
def test_probing_tells_what_cannot_be_written(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="cannot be written"):
        probe_output_files([tmp_path / "one", tmp_path / name])
    assert os.listdir(tmp_path) == []  # noqa: PTH208
