"""Rotary angles that depend on the length of a batch: each row gets those it gets alone."""

from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from tests import zoo
from tests.cli.conftest import write_rows
from tests.cli.program import succeed
from tests.doors import Role, Site, make_plan, opened
from tests.truth import brute_force
from tests.zoo import draw

ROWS = draw([7, 20, 13, 12, 20, 9, 18, 4, 17, 6])
"""On both sides of 12 tokens, in batches of 3."""
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 3.0, 5.0, 7.0],
}
MODELS: dict[str, dict[str, Any]] = {
    "phi3": {"rope_parameters": LONG_ROPE, "original_max_position_embeddings": 12},
    "llama": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 4.0, "factor": 4.0},
        "max_position_embeddings": 12,
    },
}


def run_alone(model: PreTrainedModel) -> list[brute_force.Capture]:
    """Run every row in a copy of the model that has seen no other."""
    return [brute_force.run(deepcopy(model), [row]) for row in ROWS]


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("family", sorted(MODELS))
def test_every_row_is_what_it_is_alone(family: str, streamed: bool, tmp_path: Path) -> None:
    alone = run_alone(zoo.save(family, tmp_path / "m", **MODELS[family]))
    plan = make_plan(ROWS, packed=False)
    with opened(tmp_path / "m", streamed=streamed) as subject:
        plan = replace(plan, longest_padded=subject.source.longest_padded)
        stats = subject.calibrate(plan=plan, batch_size=3)
    for layer, attention in stats.geometry.attentions():
        keys = [key for capture in alone for key, _ in capture.kv[layer.index]]
        expected = brute_force.head_amax(keys, attention.num_kv_heads)
        found = stats.sites[attention.site(Role.K)].amax.numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-5)
    for _, linear in stats.geometry.linears():
        inputs = [rows for capture in alone for rows in capture.inputs[linear.module]]
        seen = stats.sites[Site(linear.module, Role.INPUT)].amax.numpy()
        np.testing.assert_allclose(seen, brute_force.channel_amax(inputs), rtol=1e-5, atol=1e-6)


def test_commands_do_not_pad_short_rows_to_long_ones(tmp_path: Path) -> None:
    """What `verify --no-pack` scores is what the model gives to each row alone."""
    model = zoo.save("phi3", tmp_path / "m", **MODELS["phi3"])
    data = write_rows(tmp_path / "rows.jsonl", [{"input_ids": row.tolist()} for row in ROWS])
    options = ("--data", data, "--no-pack", "--batch-size", 3, "--dtype", "float32")
    succeed("verify", tmp_path / "m", *options, "--dump", tmp_path / "dump.safetensors")
    found = load_file(tmp_path / "dump.safetensors")["reference"]
    with torch.no_grad():
        scored = [model(row[None]).logits[0, :-1].log_softmax(-1) for row in ROWS]
    pairs = zip(scored, ROWS, strict=True)
    expected = torch.cat([each.gather(1, row[1:, None])[:, 0] for each, row in pairs])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
