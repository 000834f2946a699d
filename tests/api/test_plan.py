"""`plan`: recipes that quantize takes, whose files have the size and the loss that it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors import safe_open

from tests.api.test_auto import plant
from tests.cli.program import run, succeed

QUICK = ("--seq-len", 32, "--dtype", "float32", "--batch-size", 12)
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}


def sharpen(model: Any) -> None:
    """Make the output depend on all layers."""
    model.lm_head.weight.mul_(6)
    for parameter in model.model.layers.parameters():
        if parameter.ndim == 2:
            parameter.mul_(4)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return plant(tmp_path_factory.mktemp("plan"), sharpen, **SIZES)


def plan(planted: tuple[Path, Path], out: Path, *options: object) -> Any:
    model, text = planted
    command = ("plan", model, "--data", text, *QUICK, *options, "--out", out, "--json")
    return run(*command)


def count_stored(folder: Path) -> int:
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            tensors = [file.get_tensor(name) for name in file.keys()]  # noqa: SIM118
        total += sum(each.numel() * each.element_size() for each in tensors)
    return total


def test_the_recipe_gives_a_file_of_the_planned_size_that_loses_what_was_measured(
    planted: tuple[Path, Path], tmp_path: Path
) -> None:
    model, text = planted
    outcome = plan(planted, tmp_path / "plan", "--max-bytes", 0.5, "--kv-tokens", 0)
    assert outcome.code == 0, outcome.err
    found = outcome.json
    recipe = yaml.safe_load((tmp_path / "plan" / "recipe.yaml").read_text())
    assert recipe["quantize"]["layer_schemes"] or recipe["quantize"]["ignore"]
    out = tmp_path / "fp8"
    stats = tmp_path / "plan" / "stats.safetensors"
    recipe_file = tmp_path / "plan" / "recipe.yaml"
    succeed("quantize", model, "--scheme", recipe_file, "--stats", stats, "--out", out)
    assert count_stored(out) == found["bytes"]["after"] <= 0.5 * found["bytes"]["before"]
    rows = [json.loads(line) for line in text.read_text().splitlines()]
    held_out = tmp_path / "held-out.jsonl"
    held_out.write_text("".join(f"{json.dumps(row)}\n" for row in rows[-12:]))
    verified = succeed("verify", model, "--scales", out, "--data", held_out, *QUICK, "--json").json[
        "candidates"
    ][0]
    assert verified["kld_mean"] == pytest.approx(found["kld_mean"], rel=1e-5)
    assert verified["ppl_ratio"] == pytest.approx(found["ppl_ratio"], rel=1e-6)
