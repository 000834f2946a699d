"""The examples of docs/python-api.md, run as doctests."""

from __future__ import annotations

import doctest
import inspect
import re
import shutil
from pathlib import Path

import pytest

import fp8calib

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


def test_the_page_names_every_public_function() -> None:
    text = PAGE.read_text(encoding="utf-8")
    public = {name: getattr(fp8calib, name) for name in fp8calib.__all__}
    for name, item in public.items():
        assert inspect.getdoc(item), name
        if inspect.isfunction(item):
            assert re.search(rf"`{name}\(", text), name


@pytest.mark.parametrize(
    "name", ["auto", "card", "calibrate", "verify", "quantize", "export", "check"]
)
def test_every_argument_is_documented(name: str) -> None:
    function = getattr(fp8calib, name)
    documented = re.findall(r"^    (\w+): ", inspect.getdoc(function) or "", re.MULTILINE)
    arguments = list(inspect.signature(function).parameters)
    errors = [each for each in documented if each.endswith("Error")]
    assert documented == [*arguments, *errors]
