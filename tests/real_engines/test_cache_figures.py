"""Figures of every cache type, against formulas that share no code: minutes.

`tests/plugins/kv_types/test_cache_figures.py` has one family.
"""

from __future__ import annotations

from pydoc_data import topics

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.mutations_of_scales import Plant, plant
from tests.plugins.kv_types.test_cache_figures import FAMILIES, TEXT, build, compare
from tests.real_engines.vllm_job import ROOT

MODEL = ROOT / "demo" / "SmolLM2-135M-Instruct"
LARGE = (2, 26)
"""The layers where K is 2^11 times as large, and q as much smaller."""


@pytest.mark.parametrize("family", FAMILIES[1:])
def test_figures_of_families_are_within_two_percent_of_formulas(family: str) -> None:
    compare(build(family), TEXT)


@pytest.mark.parametrize("layers", [(), LARGE], ids=["as it is", "with outliers"])
def test_figures_of_the_demo_model_are_within_two_percent_of_formulas(
    layers: tuple[int, ...],
) -> None:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype="float32").eval()
    with torch.no_grad():
        for layer in layers:
            plant(model, Plant(layer, "k", 11))
    ids = AutoTokenizer.from_pretrained(MODEL)("\n".join(topics.topics.values()))["input_ids"]
    compare(model, [torch.tensor(ids[start : start + 64]) for start in (0, 4096)])
