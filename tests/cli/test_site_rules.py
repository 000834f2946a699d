"""`rules` of a recipe: other rules of some K and V, in everything that is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open

import fp8calib
from tests.cli.conftest import QUICK
from tests.cli.program import fail, succeed

RULES = """\
name: by-site
scales:
  rule: mse
  rules:
    model.layers.1.self_attn.k: percentile:90
    "*.v": headroom:2
"""
OTHERS = {"model.layers.0.self_attn.k": "mse", "model.layers.1.self_attn.k": "percentile:90"}


def read_scales(folder: Path) -> dict[str, float]:
    found: dict[str, float] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = [name for name in file.keys() if name.endswith(("k_scale", "v_scale"))]  # noqa: SIM118
            found |= {name: file.get_tensor(name).item() for name in names}
    return found


@pytest.fixture(scope="module")
def written(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("by-site")
    recipe = folder / "recipe.yaml"
    recipe.write_text(RULES + "quantize: fp8-dynamic\n")
    options = ("--data", data, *QUICK, "--recipe", recipe, "--out", folder / "out")
    succeed("calibrate", model, *options)
    return folder


def test_calibrate_export_and_quantize_write_the_scales_of_each_rule(
    model: Path, written: Path, tmp_path: Path
) -> None:
    path, recipe = written / "out" / "stats.safetensors", written / "recipe.yaml"
    stats = fp8calib.load_stats(path)
    found = read_scales(written / "out" / "kv-overlay")
    assert len(found) == 4
    for name, scale in found.items():
        rule = OTHERS.get(name.removesuffix("_scale"), "headroom:2")
        assert scale == stats.kv_scales(rule=rule)[name].item(), name
    assert read_scales(written / "out" / "fp8-dynamic") == found
    given = (path, "--recipe", recipe, "--model", model)
    succeed("export", *given, "--out", tmp_path / "exported")
    assert read_scales(tmp_path / "exported" / "kv-overlay") == found
    options = ("--scheme", recipe, "--stats", path, "--out", tmp_path / "quantized")
    succeed("quantize", model, *options)
    assert read_scales(tmp_path / "quantized") == found


def test_the_report_names_the_rules(written: Path) -> None:
    report = json.loads((written / "out" / "report.json").read_text())
    assert report["rule"] == "mse"
    assert report["rules"] == {"model.layers.1.self_attn.k": "percentile:90", "*.v": "headroom:2"}


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("model.layers.7.self_attn.k", "matches no K or V\nthey look like"),
        ("re:(", "not a regular expression"),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused_before_the_run(
    model: Path, data: Path, written: Path, tmp_path: Path, pattern: str, part: str
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f'name: r\nscales:\n  rules:\n    "{pattern}": mse\n')
    out = ("--recipe", recipe, "--out", tmp_path / "out")
    message = fail(3, "calibrate", model, "--data", data, *QUICK, *out)
    assert "scales.rules" in message
    assert part in message
    assert not (tmp_path / "out").exists()
    fail(3, "export", written / "out" / "stats.safetensors", "--model", model, *out)
