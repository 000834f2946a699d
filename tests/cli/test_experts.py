"""What `calibrate` says of experts: how many tokens each got, and which got none."""

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
    unreached = [
        f"{path}.{expert}" for path in PATHS for expert in range(8) if not tokens[path][expert]
    ]
    assert unreached, "this model is to leave some experts alone"
    counts = [count for path in PATHS for count in tokens[path]]
    assert (
        f"tokens per expert: {min(counts)} to {max(counts)}, median "
        f"{statistics.median(counts):.0f}, {len(unreached)} never reached (--fallback gives"
    ) in outcome.err
    assert unreached[0] in outcome.err
