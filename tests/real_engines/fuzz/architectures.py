"""Tiny models of every text architecture, in sizes that vLLM's kernels and FP8 blocks accept.

Heads have 64 elements (vLLM's CPU kernels need a multiple of 32 in FP8), and linears fill blocks of
128, so that what an engine refuses is not the size of the model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures.families import FAMILIES, KNOWN, SIZES
from tests.zoo import ZOO

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
_HEADS: dict[str, Any] = {"head_dim": 64}
_CHANGES: Mapping[str, Mapping[str, Any]] = KNOWN["wide"]
_FINE = ("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size")
SIMPLEST = "llama"
ARCHITECTURES = tuple(dict.fromkeys((*ZOO, *FAMILIES)))
"""The model types; the first is what a disagreement is reduced to where it persists."""


def make_config(architecture: str, **changes: Any) -> dict[str, Any]:
    """Give the fields of a tiny config; `changes` override them."""
    fields = {**SIZES, **ZOO.get(architecture, {}), **FAMILIES.get(architecture, {}), **_WIDE}
    fields |= {name: 128 for name in _FINE if name in fields}
    fields |= _HEADS if "head_dim" in fields or architecture == SIMPLEST else {}
    return {**fields, **_CHANGES.get(architecture, {}), **changes}


def randomize(model: torch.nn.Module) -> None:
    """Make norms and biases matter: what is lost of them changes a number."""
    for value in model.parameters():
        if value.dim() == 1 and bool((value == value[0]).all()):
            value.data += torch.randn_like(value) / 8


def save_model(
    architecture: str,
    folder: Path,
    dtype: str,
    *,
    fill: Callable[[torch.nn.Module], None] = randomize,
    **changes: Any,
) -> None:
    """Write a random model of an architecture, with the same numbers in every dtype."""
    torch.manual_seed(0)
    fields = make_config(architecture, **changes)
    if not hasattr(AutoConfig.for_model(architecture), "num_key_value_heads"):
        fields.pop("num_key_value_heads", None)  # which engines would read all the same
    config = AutoConfig.for_model(architecture, **fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    fill(model)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
