"""docs/schemas describe what `--json` prints, without a key too many or too few."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from fp8calib.recipe import recipe_files
from fp8calib.requests import spell_commands
from fp8calib.results import SCHEMA_VERSION
from scripts.json_schemas import make_schemas
from tests import zoo
from tests.cli.conftest import save_tokenizer, write_rows
from tests.cli.program import run, succeed
from tests.docs.pages import DOCS, compare_generated

FOLDER = DOCS / "schemas"
QUICK = ("--samples", 8, "--seq-len", 16, "--dtype", "float32")
NO_COMMANDS = {"error", "run-plan", "recipe", "receipt-file"}
"""Schemas of what is no command's result: errors, --dry-run, and the YAML of recipes."""


def close(schema: Any) -> Any:
    """Refuse keys that a schema does not name."""
    if isinstance(schema, list):
        return [close(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: close(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def load(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text())


def check(name: str, document: Any) -> None:
    """Require that a document has the keys of a schema and no others."""
    jsonschema.Draft202012Validator(close(load(name))).validate(document)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a llama, a mixtral, and text."""
    folder = tmp_path_factory.mktemp("schemas")
    for family in ("llama", "mixtral"):
        zoo.save(family, folder / family)
        save_tokenizer(folder / family)
    rows = [{"text": " ".join(f"w{i * j % 90}" for j in range(1, 40))} for i in range(30)]
    write_rows(folder / "calib.jsonl", rows)
    return folder


@pytest.fixture(scope="module")
def calibrated(place: Path) -> Path:
    """Calibrate the llama, with an FP8 checkpoint beside its scales."""
    data = ("--data", place / "calib.jsonl", *QUICK)
    command = ("calibrate", place / "llama", *data, "--recipe", "w8a8-dynamic")
    out = place / "out"
    printed = succeed(*command, "--out", out, "--json").json
    check("calibrate", printed)
    check("calibrate", json.loads((out / "report.json").read_text()))
    assert printed["quantize"]["scheme"] == "fp8-dynamic"
    return out


@pytest.mark.parametrize("name", sorted(make_schemas()))
def test_the_schemas_are_those_of_the_types(name: str) -> None:
    schema = make_schemas()[name]
    jsonschema.Draft202012Validator.check_schema(schema)
    text = json.dumps(schema, indent=2) + "\n"
    compare_generated(FOLDER / f"{name}.json", text, maker="tests/docs/test_schemas.py")


def test_every_command_has_a_schema_and_every_schema_a_command() -> None:
    commands = set(spell_commands())
    assert {path.stem for path in FOLDER.glob("*.json")} == commands | NO_COMMANDS
    page = (DOCS / "reference.md").read_text()
    assert [name for name in commands | NO_COMMANDS if f"schemas/{name}.json" not in page] == []


def test_the_version_of_the_schemas_is_that_of_the_program() -> None:
    for name in sorted(make_schemas().keys() - {"recipe"}):
        assert f'"const": {SCHEMA_VERSION}' in (FOLDER / f"{name}.json").read_text(), name


def test_a_schema_refuses_what_is_not_printed(calibrated: Path) -> None:
    report = json.loads((calibrated / "report.json").read_text())
    for broken in (report | {"more": 1}, report | {"tokens": "8"}, {"schema_version": 1}):
        with pytest.raises(jsonschema.ValidationError):
            check("calibrate", broken)


def _list_calibrations(place: Path) -> Iterator[tuple[object, ...]]:
    data = ("--data", place / "calib.jsonl", *QUICK)
    yield ("calibrate", place / "mixtral", *data, "--out", place / "experts")
    for part in ("1/2", "2/2"):
        shard = ("--shard", part, "--out", place / f"shard-{part[0]}")
        yield ("calibrate", place / "llama", *data, *shard)


def test_experts_and_shards(place: Path) -> None:
    for command in _list_calibrations(place):
        check("calibrate", succeed(*command, "--json").json)
    shards = (place / "shard-1", place / "shard-2")
    joined = succeed("merge", *shards, "--out", place / "joined.safetensors", "--json")
    check("merge", joined.json)
    check("show", succeed("show", shards[0], "--json").json)
    check("show", succeed("show", place / "experts", "--json").json)


def test_plans(place: Path) -> None:
    data = ("--data", place / "calib.jsonl", *QUICK, "--dry-run", "--json")
    scheme = ("--scheme", "w8a16", "--rounding", "gptq", "--out", place / "gptq")
    check("run-plan", succeed("calibrate", place / "llama", *data, "--shard", "1/2").json)
    check("run-plan", succeed("verify", place / "llama", *data).json)
    check("run-plan", succeed("quantize", place / "llama", *scheme, *data).json)
    planned = ("plan", place / "llama", "--max-bytes", 0.8, "--out", place / "planned")
    check("run-plan", succeed(*planned, *data).json)
    check("plan", succeed(*planned, *data[:-2], "--json").json)


def test_quantize_and_check(place: Path, calibrated: Path) -> None:
    data = ("--data", place / "calib.jsonl", *QUICK)
    scheme = ("--scheme", "fp8-static", "--rounding", "gptq")
    static = ("quantize", place / "llama", *scheme, *data, "--out", place / "static")
    check("quantize", succeed(*static, "--json").json)
    for folder in (calibrated / "kv-overlay", calibrated / "fp8-dynamic", place / "static"):
        report = run("check", folder, "--engine", "vllm", "--engine", "tgi", "--json").json
        check("check", report)


def test_export_and_extract(place: Path, calibrated: Path) -> None:
    stats = calibrated / "stats.safetensors"
    plain = ("--format", "vllm-json", "kv-scales", "--tp", 2, "--out", place / "json")
    check("export", succeed("export", stats, *plain, "--json").json)
    succeed("quantize", place / "llama", "--scheme", "w8a16", "--out", place / "w8a16")
    graft = ("--format", "kv-overlay", "--model", place / "w8a16", "--out", place / "graft")
    report = succeed("export", stats, *graft, "--json").json
    assert report["serving"]
    check("export", report)
    source = ("--quantized-model", calibrated / "kv-overlay", "--model", place / "llama")
    for form in ("kv-overlay-head", "vllm-json"):
        out = ("--format", form, "--out", place / f"extracted-{form}")
        check("extract-kv-scales", succeed("extract-kv-scales", *source, *out, "--json").json)
    check("show", succeed("show", place / "json" / "kv_scales.safetensors", "--json").json)


def test_verify(place: Path, calibrated: Path) -> None:
    data = ("--data", place / "calib.jsonl", *QUICK)
    ask = ("--sensitivity", "--rules", "amax,mse", "--gate", "kv")
    scales = ("--scales", calibrated / "stats.safetensors", "--scales", calibrated / "fp8-dynamic")
    outcome = run("verify", place / "llama", *scales, *data, *ask, "--json")
    assert outcome.code in {0, 8, 9}
    check("verify", outcome.json)


def test_auto(place: Path) -> None:
    data = ("--data", place / "calib.jsonl", *QUICK)
    outcome = run("auto", place / "llama", *data, "--out", place / "auto", "--json")
    assert outcome.code in {0, 8, 9}
    check("auto", outcome.json)


def test_card(calibrated: Path) -> None:
    base = ("--base-model", "org/name", "--force", "--json")
    check("card", succeed("card", calibrated / "fp8-dynamic", *base).json)


def test_recipes_and_errors() -> None:
    check("recipes", succeed("recipes", "--json").json)
    check("recipes", succeed("recipes", "kv", "--json").json)
    check("error", run("show", "no-such-file", "--json").json)
    check("error", run("verify", "--no-such-option", "--json").json)


def test_the_schema_of_recipes_accepts_what_the_program_accepts() -> None:
    schema = jsonschema.Draft202012Validator(load("recipe"))
    for path in recipe_files().values():
        schema.validate(yaml.safe_load(path.read_text()))
    schema.validate({"name": "a", "scales": {"rule": "percentile:99.9"}, "query_scale": "yes"})
    for wrong in ({}, {"name": "a", "more": 1}, {"name": "a", "data": {"samples": 0}}):
        assert not schema.is_valid(wrong)
