"""Tiny random models of every architecture that the project names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

NEEDS_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older releases of transformers lack the model type, or load and run it otherwise",
)

_SMALL: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_QWEN_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}

ZOO: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 8},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "gemma2": {"head_dim": 16, **_SLIDING},
    "gemma3_text": {"head_dim": 16, **_SLIDING},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "starcoder2": {},
    "mixtral": _EXPERTS,
    "qwen3_moe": {"head_dim": 16, **_QWEN_EXPERTS},
    "gpt_oss": {"head_dim": 16, **_EXPERTS, **_SLIDING},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 24,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
    "gemma3n_text": {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 8,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "qwen3_next": {
        "head_dim": 16,
        **_QWEN_EXPERTS,
        "shared_expert_intermediate_size": 24,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
}


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a random fp32 model of `family`; `changes` override the tiny config."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**_SMALL, **ZOO[family], **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def save(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a model, write it as a checkpoint, and return it."""
    shard_size = changes.pop("max_shard_size", "5GB")
    model = build(family, seed=seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model
