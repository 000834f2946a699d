"""`--rule`: from the command line to the numbers in the files."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.cli.conftest import ALL_FORMATS, QUICK
from tests.cli.program import Outcome, snapshot, succeed


@pytest.fixture
def stats(calibrated: tuple[Path, Outcome]) -> Path:
    return calibrated[0] / "stats.safetensors"


@pytest.mark.parametrize("rule", ["percentile:99", "mse", "headroom:1.5"])
def test_calibrate_and_export_follow_a_rule_alike(
    stats: Path, model: Path, data: Path, tmp_path: Path, rule: str
) -> None:
    options = [part for name in ALL_FORMATS for part in ("--format", name)]
    options += ["--tp", "1", "--tp", "2", "--query-scale", "yes", "--rule", rule]
    command = ("calibrate", model, "--data", data, *QUICK, *options, "--out", tmp_path / "c")
    report = succeed(*command, "--json").json
    exported = succeed(
        "export", stats, *options, "--model", model, "--out", tmp_path / "e", "--json"
    ).json
    direct, again = snapshot(tmp_path / "c"), snapshot(tmp_path / "e")
    assert {path: direct[path] for path in again} == again
    assert report["rule"] == rule
    assert (tmp_path / "c" / "stats.safetensors").read_bytes() == stats.read_bytes()
    notes = [text for text in report["warnings"] if "needs a histogram" in text]
    assert notes == [text for text in exported["warnings"] if "needs a histogram" in text]
    why = f"{rule} needs a histogram, which is missing: amax is used"
    kept = f"model.layers.0.self_attn.q and 1 more: {why}"
    assert notes == ([] if rule.startswith("headroom") else [kept])


def test_a_rule_of_a_recipe_is_followed_and_the_command_line_wins(
    model: Path, data: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("name: mine\nscales: {rule: headroom:4}\nformats: [kv-scales]\n")
    command = ("calibrate", model, "--data", data, *QUICK, "--recipe", recipe)
    command = (*command, "--query-scale", "yes")
    scales = {}
    for name, options in {"recipe": (), "line": ("--rule", "amax")}.items():
        succeed(*command, *options, "--out", tmp_path / name)
        scales[name] = load_file(tmp_path / name / "kv_scales.safetensors")
    assert len(scales["line"]) == 6
    for key, scale in scales["line"].items():
        assert scales["recipe"][key].item() == 4 * scale.item()
