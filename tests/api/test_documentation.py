"""The examples of docs/python-api.md, run as doctests."""

from __future__ import annotations

import doctest
import shutil
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "python-api.md"


@pytest.mark.filterwarnings("ignore::fp8calib.Fp8CalibWarning")
def test_the_examples_give_what_the_page_shows(
    model: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(model, tmp_path / "model")
    shutil.copy(data, tmp_path / "calib.jsonl")
    monkeypatch.chdir(tmp_path)
    result = doctest.testfile(str(PAGE), module_relative=False)
    assert result.attempted > 20
    assert not result.failed
