"""`--layer-scheme`, `layer_schemes` in recipes and in Python: one checkpoint, several schemes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import fp8calib
from tests import zoo
from tests.cli.conftest import QUICK
from tests.cli.program import Outcome, fail, snapshot, succeed
from tests.plugins.gptq.test_checkpoints import command

CHOICE = {"*.o_proj": "fp8-static", "*.layers.1.mlp": "w8a16", "*.down_proj": "fp8-block"}
OPTIONS = [part for pair in CHOICE.items() for part in ("--layer-scheme", "=".join(pair))]


def round_mixed(folder: Path, out: str = "mixed") -> tuple[Any, ...]:
    return (*command(folder / "model", folder, "fp8-dynamic", out), *OPTIONS)


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


def find_scheme(module: str) -> str:
    """Find the scheme of a linear of the llama by hand."""
    if module.endswith("o_proj"):
        return "fp8-static"
    if ".layers.1.mlp." in module:
        return "w8a16"
    return "fp8-block" if module.endswith("down_proj") else "fp8-dynamic"


def test_the_report_names_each_pattern_and_counts_its_linears(
    model: Path, stats: Path, tmp_path: Path
) -> None:
    made = ("quantize", model, "--scheme", "fp8-dynamic", *OPTIONS, "--stats", stats)
    report = succeed(*made, "--out", tmp_path / "a", "--json").json
    assert report["scheme"] == "fp8-dynamic"
    assert report["layer_schemes"] == [
        {"pattern": "*.o_proj", "scheme": "fp8-static", "linears": 2},
        {"pattern": "*.layers.1.mlp", "scheme": "w8a16", "linears": 3},
        {"pattern": "*.down_proj", "scheme": "fp8-block", "linears": 1},
    ]
    text = succeed(*made, "--out", tmp_path / "b").out
    schemes = "fp8-dynamic, 2 fp8-static, 3 w8a16, 1 fp8-block"
    assert f"14 linears quantized ({schemes}, compressed-tensors)" in text
    stored = load_file(tmp_path / "a" / "model.safetensors")
    linears = {name.removesuffix(".weight_scale") for name in stored if "weight_scale" in name}
    static = {name.removesuffix(".input_scale") for name in stored if "input_scale" in name}
    assert static == {module for module in linears if find_scheme(module) == "fp8-static"}
    single = succeed("quantize", model, "--scheme", "w8a16", "--out", tmp_path / "c", "--json")
    assert single.json["layer_schemes"] == []


def test_a_finished_checkpoint_of_other_patterns_is_not_taken_for_this_one(
    model: Path, tmp_path: Path
) -> None:
    """Both have the same tensors of the same shapes."""
    made = ("quantize", model, "--scheme", "fp8-dynamic", "--out", tmp_path / "out")
    first, second = ("--layer-scheme", "*.o_proj=w8a16"), ("--layer-scheme", "*.down_proj=w8a16")
    succeed(*made, *first)
    assert "finished already" in succeed(*made, *first, "--resume").err
    assert "the folder is not empty" in fail(2, *made, *second, "--resume")


def compare(folder: Path, count: int) -> None:
    """Compare all tensors of each linear with those of the checkpoint of its scheme."""
    mixed = load_file(folder / "mixed" / "model.safetensors")
    linears = [name.removesuffix("_scale") for name in mixed if name.endswith("weight_scale")]
    assert len(linears) == count
    for weight in linears:
        module = weight.removesuffix(".weight")
        single = load_file(folder / find_scheme(module) / "model.safetensors")
        names = {name for name in single if name.startswith(f"{module}.")}
        assert names == {name for name in mixed if name.startswith(f"{module}.")}
        for name in names:
            assert torch.equal(mixed[name].float(), single[name].float()), name


def test_recipes_and_python_write_the_same_bytes(model: Path, data: Path, tmp_path: Path) -> None:
    recipe = {
        "name": "mine",
        "formats": [],
        "quantize": {"scheme": "fp8-dynamic", "layer_schemes": CHOICE},
    }
    path, out = tmp_path / "mine.yaml", tmp_path / "out"
    path.write_text(yaml.safe_dump(recipe, sort_keys=False))
    made = ("calibrate", model, "--data", data, *QUICK, "--recipe", path, "--out", out)
    report = succeed(*made, "--json").json
    found = out / "fp8-dynamic-mixed"
    assert "fp8-dynamic-mixed/model.safetensors" in report["files"]
    assert report["quantize"]["scheme"] == "fp8-dynamic"
    assert {each["path"] for each in report["checked"]} == {"fp8-dynamic-mixed"}
    stats = out / "stats.safetensors"
    made = ("quantize", model, "--scheme", "fp8-dynamic", *OPTIONS, "--stats", stats)
    succeed(*made, "--out", tmp_path / "cli")
    fp8calib.quantize(
        str(model), "fp8-dynamic", tmp_path / "python", layer_schemes=CHOICE, stats=stats
    )
    assert snapshot(found) == snapshot(tmp_path / "cli") == snapshot(tmp_path / "python")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["*.o_proj"], "--layer-scheme *.o_proj: must be PATTERN=SCHEME"),
        (["=w8a16"], "--layer-scheme =w8a16: must be PATTERN=SCHEME"),
        (["*.o_proj=w8a16", "*.o_proj=fp8-block"], "--layer-scheme *.o_proj: is given twice"),
        (["re:a=b=w8a16"], "--layer-scheme re:a=b: matches no module"),
        (["*.o_proj=fp8-static"], "--layer-scheme *.o_proj=fp8-static: its input scales come"),
    ],
)
def test_a_wrong_pattern_or_scheme_is_an_error_that_names_it(
    options: list[str], says: str, model: Path, tmp_path: Path
) -> None:
    patterns = [part for text in options for part in ("--layer-scheme", text)]
    made = ("quantize", model, "--scheme", "fp8-dynamic", *patterns, "--out", tmp_path / "out")
    assert says in fail(2, *made)
    assert not list(tmp_path.iterdir())


# --- GPTQ -----------------------------------------------------------------------------------------


# --- what reads the checkpoint --------------------------------------------------------------------


def test_verify_and_check_read_it(model: Path, data: Path, stats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    made = ("quantize", model, "--scheme", "fp8-dynamic", *OPTIONS[:4], "--stats", stats)
    succeed(*made, "--out", out)
    report = succeed("verify", model, "--scales", out, "--data", data, *QUICK, "--json")
    assert report.json["candidates"][0]["name"] == str(out)
    checked = succeed("check", out, "--json").json
    assert all(engine["ok"] for engine in checked["engines"].values())


def test_gptq_rounds_each_linear_as_a_run_of_its_scheme_does(tmp_path: Path) -> None:
    """A run does not change the model, so inputs and Hessians are the same in all runs."""
    zoo.save("llama", tmp_path / "model")
    report = succeed(*round_mixed(tmp_path), "--json").json
    for scheme in ("fp8-static", "fp8-dynamic", "w8a16", "fp8-block"):
        succeed(*command(tmp_path / "model", tmp_path, scheme, scheme))
    compare(tmp_path, 14)
    chosen = {find_scheme(e["module"]) for e in report["rounded"] if e["rounding"] == "gptq"}
    assert chosen == {"fp8-static", "fp8-dynamic", "w8a16", "fp8-block"}
