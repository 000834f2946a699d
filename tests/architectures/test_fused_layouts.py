"""The order of rows in fused q/k/v weights, seen by silencing one head at a time."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests import zoo
from tests.architectures import families
from tests.doors import find_geometry
from tests.truth import brute_force
from tests.zoo import draw

_GPT2 = families.FAMILIES["gpt_bigcode"]
_OLD_FALCON = {"new_decoder_architecture": False, "alibi": False}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "bloom": ("bloom", families.FAMILIES["bloom"]),
    "dbrx": ("dbrx", families.FAMILIES["dbrx"]),
    "falcon": ("falcon", zoo.ZOO["falcon"]),
    "falcon, one KV head": ("falcon", {**_OLD_FALCON, "multi_query": True}),
    "falcon, ALiBi": ("falcon", {**_OLD_FALCON, "multi_query": False, "alibi": True}),
    "gpt2": ("gpt2", zoo.ZOO["gpt2"]),
    "gpt_bigcode": ("gpt_bigcode", {**_GPT2, "multi_query": False}),
    "gpt_bigcode, one KV head": ("gpt_bigcode", _GPT2),
    "gpt_neox": ("gpt_neox", {}),
    "mpt": ("mpt", families.FAMILIES["mpt"]),
    "persimmon": ("persimmon", {"qk_layernorm": False}),
    "phi3": ("phi3", {}),
}


def silent_heads(x: np.ndarray) -> list[int]:
    """List the heads of a [1, H, S, D] tensor that are all zeros."""
    return [head for head in range(x.shape[1]) if not x[0, head].any()]


def silence(module: Any, rows: list[int]) -> None:
    """Zero output rows of a linear, and all of its bias."""
    weight = module.weight.T if isinstance(module, Conv1D) else module.weight
    with torch.no_grad():
        weight[rows] = 0
        if module.bias is not None:
            module.bias.zero_()


def fused_linear(model: nn.Module) -> tuple[Any, int]:
    geometry = find_geometry(model)
    attention = geometry.layers[0].attention
    assert attention is not None
    return next(x for x in geometry.layers[0].linears if len(x.parts) == 3), attention.num_kv_heads


@pytest.mark.parametrize("layout", sorted(LAYOUTS))
def test_the_rows_of_a_head_feed_that_head_and_no_other(layout: str) -> None:
    """With the rows of one head zeroed, that head of q, k or v is zero and nothing else."""
    model = families.build(*LAYOUTS[layout])
    linear, num_kv_heads = fused_linear(model)
    module = model.get_submodule(linear.module)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    assert [part.name for part in linear.parts] == ["q_proj", "k_proj", "v_proj"]
    for part in linear.parts:
        for unit in range(part.count):
            silence(module, part.rows(range(unit, unit + 1)))
            truth = brute_force.run(model, draw([12]))
            module.load_state_dict(before)
            key, value = truth.kv[0][0]
            copies = key.shape[1] // num_kv_heads
            silenced = list(range(unit * copies, (unit + 1) * copies))
            assert silent_heads(key) == (silenced if part.name == "k_proj" else [])
            assert silent_heads(value) == (silenced if part.name == "v_proj" else [])
            if truth.queries[0]:
                query = truth.queries[0][0]
                assert silent_heads(query) == ([unit] if part.name == "q_proj" else [])
