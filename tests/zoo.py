"""Tiny random models of every architecture that the project names."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

from tests.architectures import families
from tests.architectures.families import EXPERTS, GPT2, SLIDING

NEEDS_5_23 = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.23"),
    reason="older releases of transformers lack the model type, or load and run it otherwise",
)

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
    "gemma2": {"head_dim": 16, **SLIDING},
    "gemma3_text": {"head_dim": 16, **SLIDING},
    "phi3": {},
    "gpt2": GPT2,
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "gpt_neox": {},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "starcoder2": {},
    "mixtral": EXPERTS,
    "qwen3_moe": {"head_dim": 16, **_QWEN_EXPERTS},
    "gpt_oss": {"head_dim": 16, **EXPERTS, **SLIDING},
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
        "topk_method": "noaux_tc",
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


CONFIGS = ZOO | families.FAMILIES


def build(family: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """Build a random fp32 model of any family that tests know; `changes` override its config."""
    return families.build(family, {**CONFIGS[family], **changes}, seed=seed)


def save(family: str, folder: Path, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    shard_size = changes.pop("max_shard_size", "5GB")
    model = build(family, seed=seed, **changes)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def draw(lengths: list[int], *, seed: int = 7) -> list[torch.Tensor]:
    """Draw sequences of random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 128, (length,), generator=generator) for length in lengths]
