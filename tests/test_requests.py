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


def test_shards_are_merged_by_a_function(tmp_path: Path) -> None:
    zoo.save("llama", tmp_path / "model")
    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"input_ids": [i + 1] * 16}) + "\n" for i in range(4)))
    for shard in ("1/2", "2/2"):
        out = ("--out", tmp_path / shard[0], "--shard", shard)
        size = ("--samples", 4, "--seq-len", 16)
        succeed("calibrate", tmp_path / "model", "--data", text, *size, *out)
    shards = [tmp_path / "1", str(tmp_path / "2")]
    printed = succeed("merge", *shards, "--out", tmp_path / "a.safetensors", "--json").json
    result = fp8calib.merge(shards, tmp_path / "b.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()
    assert (result.tokens, result.sequences, result.sites) == (64, 4, printed["sites"])
    with pytest.raises(UsageError, match="shards: must be a list of paths, found str"):
        fp8calib.merge("x", tmp_path / "c.safetensors")


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
