"""What `calibrate` says of experts: how many tokens each got, and which got none."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import Outcome, succeed

PATHS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    zoo.save("mixtral", folder, num_local_experts=8)
    return folder


def calibrate(model: Path, out: Path, *options: object) -> Outcome:
    rows = write_rows(out.with_suffix(".jsonl"), [{"input_ids": [5, 9, 41, 77, 23, 5, 64]}])
    return succeed("calibrate", model, "--data", rows, *options, "--out", out, "--json")


def test_tokens_per_expert_are_told_for_every_layer(mixtral: Path, tmp_path: Path) -> None:
    outcome = calibrate(mixtral, tmp_path / "out")
    report = outcome.json
    tokens = report["expert_tokens"]
    assert [sum(counts) for counts in tokens.values()] == [7 * 2, 7 * 2]
    assert report["experts"]["fallback"] == "layer-max"
    assert report["experts"]["layers"] == [
        {
            "module": path,
            "min": min(tokens[path]),
            "median": statistics.median(tokens[path]),
            "max": max(tokens[path]),
            "never_reached": [expert for expert in range(8) if tokens[path][expert] == 0],
        }
        for path in PATHS
    ]
    unreached = [layer["never_reached"] for layer in report["experts"]["layers"]]
    assert all(unreached), "this model is to leave some experts alone"
    assert (
        f"{sum(map(len, unreached))} experts were never reached: they get the largest scale of "
        "the same role in their layer\n"
    ) in outcome.err
    for path, experts in zip(PATHS, unreached, strict=True):
        assert f"  {path}: {', '.join(map(str, experts))}\n" in outcome.err


def test_the_fallback_that_was_asked_for_is_told(mixtral: Path, tmp_path: Path) -> None:
    outcome = calibrate(mixtral, tmp_path / "out", "--fallback", "one")
    assert outcome.json["experts"]["fallback"] == "one"
    assert "never reached: they get scale 1.0\n" in outcome.err


def test_a_model_without_experts_has_nothing_to_tell(model: Path, tmp_path: Path) -> None:
    outcome = calibrate(model, tmp_path / "out")
    assert outcome.json["experts"] is None
    assert "tokens per expert" not in outcome.err


def test_a_shard_leaves_it_to_the_whole(mixtral: Path, tmp_path: Path) -> None:
    outcome = calibrate(mixtral, tmp_path / "out", "--shard", "1/1")
    assert outcome.json["experts"] is None
