"""Tiny models of every text architecture, in sizes that vLLM's kernels and FP8 blocks accept.

Heads have 64 elements (vLLM's CPU kernels need a multiple of 32 in FP8), and linears fill blocks of
128, so that what an engine refuses is not the size of the model.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.architectures.families import FAMILIES, SIZES
from tests.zoo import ZOO

_WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256}
_HEADS: dict[str, Any] = {"head_dim": 64}
_LATENT: dict[str, Any] = {
    "topk_method": "noaux_tc",
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 64}
_GPT2 = {"n_embd": 256}
_LONG = {"max_position_embeddings": 16384}
_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "apertus": _LONG,
    "bamba": _MAMBA,
    "dbrx": {
        "d_model": 256,
        "ffn_config": FAMILIES["dbrx"]["ffn_config"] | {"ffn_hidden_size": 256, "hidden_size": 256},
    },
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_d_head": 64},
    "gemma4_text": {"global_head_dim": 64},
    "glm4_moe_lite": _LATENT,
    "gpt2": _GPT2,
    "gpt_bigcode": _GPT2,
    "gpt_oss": {"max_position_embeddings": 4096 * 32},
    "gptj": {**_GPT2, "rotary_dim": 16},
    "granitemoehybrid": _MAMBA,
    "llama4_text": {"intermediate_size_mlp": 256, **_LONG},
    "lfm2": {
        "block_auto_adjust_ff_dim": False,
        "block_dim": 256,
        "block_multiple_of": 128,
        "conv_dim": 256,
    },
    "minimax_m2": {"use_routing_bias": True},
    "mpt": {"d_model": 256},
    "nemotron_h": {"mamba_head_dim": 64},
    "phimoe": {"num_hidden_layers": 1},  # vLLM traces its router for ten seconds a layer
    "opt": {"ffn_dim": 256, "word_embed_proj_dim": 256},
    "xglm": {"d_model": 256, "ffn_dim": 256},
}
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
