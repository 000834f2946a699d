"""Figures of every cache type for tiny families, against formulas that share no code."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from fp8calib.plugins.kv_types import kv_types
from fp8calib.plugins.kv_types.types import CACHE_TYPES
from tests import zoo
from tests.kit.minutes import takes_minutes
from tests.plugins.kv_types.cache_figures import TYPES, score

FAMILIES = ("llama", "gemma3_text", "qwen3_moe")
NOT_HERE = {"fp8_ds_mla", "fp8_quantized_cache"}
"""Compared elsewhere: one stores latents; transformers has a class of the other."""
TEXT = [
    torch.randint(3, 128, (64,), generator=torch.Generator().manual_seed(seed)) for seed in range(6)
]


def build(family: str) -> PreTrainedModel:
    """Build a model whose attention matters, with heads that every type takes."""
    layers = {"num_hidden_layers": 6}
    if family == "gemma3_text":
        layers["layer_types"] = ["sliding_attention", "full_attention"] * 3
    model = zoo.build(family, head_dim=32, **layers)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
                parameter.mul_(2)
    return model


def compare(model: PreTrainedModel, text: Sequence[torch.Tensor]) -> None:
    """Compare the figures of `kv-types` with those of formulas."""
    names = [*(name for name in CACHE_TYPES if name not in NOT_HERE), "fp8_e5m2"]
    asked = {"data": text, "seq_len": len(text[0]), "engine": "reference"}
    result = kv_types(model, kv_cache_dtype=names, **asked)
    found = {row.name: row.kld_mean for row in result.types}
    assert found.keys() == TYPES.keys()
    for name, wanted in score(model, text):
        assert found[name] == pytest.approx(wanted, rel=0.02), name


@takes_minutes
def test_figures_are_within_two_percent_of_formulas() -> None:
    """`real_engines/test_cache_figures.py` has other families, and the demo model."""
    compare(build(FAMILIES[0]), TEXT)
