"""A field of a request is the only declaration of an option."""

import inspect
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

import fp8calib
from fp8calib import commands
from fp8calib.cli import app as program
from fp8calib.commands import COMMANDS, find_request
from fp8calib.commands.request import list_options
from fp8calib.errors import UsageError
from scripts.reference import list_requests, make_commands
from tests import zoo
from tests.cli.program import snapshot, succeed
from tests.cli.quantized_sources import SOURCES, save_source

MADE_UP = '''
from dataclasses import KW_ONLY
from pathlib import Path

from fp8calib.commands.request import as_function, option, request_class


@request_class
class CountSheepRequest:
    """Count the sheep.

    Example: fp8calib count-sheep field
    """

    place: str | Path = option("PLACE", "Where they are.", reads=Path)
    _: KW_ONLY
    most: int = option("--most N", "Stop after so many.", default=7, least=1)
    lambs: bool = option("--no-lambs", "Skip lambs.", default=True, negates=True)
    herd: str | None = option("", "Their herd.", default=None)


def run(request: CountSheepRequest, reporter) -> str:
    """Count.

    Raises:
        UsageError: there are none.
    """
    reporter.warn("--most is small")
    return f"{request.place} {request.most} {request.lambs} {request.herd}"


count_sheep = as_function("count_sheep", CountSheepRequest, run)
'''


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Add a command: one file."""
    (tmp_path / "count_sheep.py").write_text(MADE_UP)
    monkeypatch.setattr(commands, "__path__", [*commands.__path__, str(tmp_path)])
    for user in (commands, fp8calib):
        monkeypatch.setattr(user, "COMMANDS", (*commands.COMMANDS, "count_sheep"))
    yield "count_sheep"
    sys.modules.pop("fp8calib.commands.count_sheep", None)


@pytest.mark.usefixtures("made_up")
def test_a_file_is_a_command() -> None:
    run = CliRunner().invoke
    assert " count-sheep Count the sheep. " in " ".join(run(program.app, ["--help"]).output.split())
    text = " ".join(run(program.app, ["count-sheep", "--help"]).output.split())
    assert "Count the sheep." in text
    assert "--most N Stop after so many. [default: 7; x>=1]" in text
    assert "--no-lambs Skip lambs. Output: --json" in text
    assert "herd" not in text
    place = Path(__file__).name
    counted = run(program.app, ["count-sheep", place, "--most", "3", "--no-lambs"])
    assert counted.output.splitlines()[-1] == f"{place} 3 False None"
    assert run(program.app, ["count-sheep", "x", "--most", "0"]).exit_code == 2


def test_a_file_is_a_function(made_up: str) -> None:
    assert "### count-sheep\n\nCount the sheep.\n" in make_commands(list_requests())
    count = getattr(fp8calib, made_up)
    with pytest.warns(fp8calib.Fp8CalibWarning, match="^--most is small") as warned:
        assert count("x", most=3, herd="a") == "x 3 True a"
    assert warned[0].filename == __file__
    parameter = inspect.signature(count).parameters["most"]
    assert (parameter.default, parameter.annotation) == (7, "int")
    assert inspect.getdoc(count) == (
        "Count the sheep.\n\nArgs:\n    place: Where they are.\n    most: Stop after so many.\n"
        "    lambs: False: skip lambs.\n    herd: Their herd.\n\n"
        "Raises:\n    UsageError: there are none."
    )
    with pytest.raises(UsageError, match=r"^--most 0: must be 1 or more"):
        count("x", most=0)
    with pytest.raises(TypeError, match=r"got an unexpected keyword argument 'least'"):
        count("x", least=3)


@pytest.mark.parametrize("name", ["compressed-tensors", "rfc"])
def test_a_function_does_what_its_command_does(name: str, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    source, model = save_source(name, tmp_path / SOURCES[name]), tmp_path / "model"
    command = ("extract-kv-scales", "--quantized-model", source, "--model", model)
    printed = succeed(*command, "--out", tmp_path / "one", "--format", "kv-scales", "--json").json
    with pytest.warns(fp8calib.Fp8CalibWarning) as warned:
        result = fp8calib.extract_kv_scales(
            str(source), str(model), tmp_path / "two", formats="kv-scales"
        )
    assert [str(each.message) for each in warned] == printed["notes"]
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
    found = json.loads(json.dumps(result.to_json()))
    assert found.keys() == printed.keys()
    for key in ("dialect", "format", "layers", "notes", "taken_from", "tp", "kv_bytes_per_token"):
        assert found[key] == printed[key]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_function_takes_a_path_where_it_takes_a_model(command: str) -> None:
    options = {each.name: each.type for each in list_options(find_request(command))}
    assert "Path" in options.get("model", "Path")
