"""A field of a request is the only declaration of an option."""

from __future__ import annotations

import inspect
import json
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import pytest
from typer.testing import CliRunner

import fp8calib
from fp8calib.cli import app as commands
from fp8calib.commands.function import Reporter, as_function
from fp8calib.errors import UsageError
from fp8calib.requests.options import Option
from tests import zoo
from tests.cli.program import snapshot, succeed
from tests.cli.quantized_sources import SOURCES


@dataclass(frozen=True, slots=True)
class MadeUpRequest:
    """Count the sheep.

    Example: fp8calib count field
    """

    place: Annotated[str | Path, Option(metavar="PLACE", help="Where they are.")]
    _: KW_ONLY
    most: Annotated[int, Option("--most", metavar="N", least=1, help="Stop after so many.")] = 7


def _run(request: MadeUpRequest, reporter: Reporter) -> str:
    reporter.warn("--most is small")
    return f"{request.place} {request.most}"


def test_a_field_is_an_option_of_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    monkeypatch.setattr("fp8calib.cli.recipes.run_recipes", seen.append)
    monkeypatch.setattr(commands, "app", commands.typer.Typer(rich_markup_mode=None))
    commands._register("count", MadeUpRequest, "recipes:run_recipes")
    commands._register("count-too", MadeUpRequest, "recipes:run_recipes")  # one is no sub-command
    run = CliRunner().invoke
    text = " ".join(run(commands.app, ["count", "--help"]).output.split())
    assert "Count the sheep." in text
    assert "--most N Stop after so many. [default: 7; x>=1]" in text
    assert run(commands.app, ["count", "x", "--most", "3"]).exit_code == 0
    assert seen == [MadeUpRequest(Path("x"), most=3)]
    assert run(commands.app, ["count", "x", "--most", "0"]).exit_code == 2


def test_a_field_is_an_argument_of_the_function() -> None:
    count = as_function("count", MadeUpRequest, _run)
    with pytest.warns(fp8calib.Fp8CalibWarning, match="^most= is small|^most is small"):
        assert count("x", most=3) == "x 3"
    parameter = inspect.signature(count).parameters["most"]
    assert (parameter.default, parameter.annotation) == (7, "int")
    assert inspect.getdoc(count) == (
        "Count the sheep.\n\nArgs:\n    place: Where they are.\n    most: Stop after so many."
    )
    with pytest.raises(UsageError, match="most: must be a whole number, found str"):
        count("x", most="3")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="least"):
        count("x", least=3)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["compressed-tensors", "rfc"])
def test_a_function_does_what_its_command_does(name: str, tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    place, save, _ = SOURCES[name]
    source, model = save(tmp_path / place), tmp_path / "model"
    command = ("extract-kv-scales", "--quantized-model", source, "--model", model)
    printed = succeed(*command, "--out", tmp_path / "one", "--format", "kv-scales", "--json").json
    with pytest.warns(fp8calib.Fp8CalibWarning) as warned:
        result = fp8calib.extract_kv_scales(
            str(source), str(model), tmp_path / "two", formats=["kv-scales"]
        )
    assert [str(each.message) for each in warned] == printed["notes"]
    assert snapshot(tmp_path / "two") == snapshot(tmp_path / "one")
    found = json.loads(result.model_dump_json(exclude_none=True))
    assert found.keys() | {"schema_version", "passed"} == printed.keys()
    for key in ("dialect", "format", "layers", "notes", "taken_from", "tp", "kv_bytes_per_token"):
        assert found[key] == printed[key]
