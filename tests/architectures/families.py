"""Tiny random models of further families, by what each needs besides the common sizes."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SIZES: dict[str, Any] = {
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
GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
_FINE_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {
    "moe_intermediate_size": 24,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1}
_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "bamba": {"attn_layer_indices": [1], **_MAMBA},
    "biogpt": {},
    "bloom": {"n_layer": 2, "n_head": 4},
    "cohere": {},
    "cohere2": SLIDING,
    "dbrx": {
        "d_model": 32,
        "n_heads": 4,
        "n_layers": 2,
        "max_seq_len": 128,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {
            "ffn_hidden_size": 48,
            "hidden_size": 32,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v2": {**ROUTED, **LATENT, "n_group": 2},
    "dots1": ROUTED,
    "ernie4_5": {},
    "ernie4_5_moe": {
        "moe_num_experts": 4,
        "moe_k": 2,
        "moe_intermediate_size": 24,
        "moe_layer_start_index": 1,
        "moe_num_shared_experts": 1,
    },
    "exaone4": SLIDING,
    "falcon_h1": {**_MAMBA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma4_text": {
        "head_dim": 16,
        "global_head_dim": 16,
        "num_kv_shared_layers": 0,
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 8,
        **SLIDING,
    },
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": {"head_dim": 8, **ROUTED},
    "glm4_moe_lite": {**ROUTED, **LATENT, "mlp_layer_types": ["dense", "sparse"]},
    "gpt_bigcode": GPT2,
    "gptj": {**GPT2, "rotary_dim": 4},
    "granite": {},
    "granitemoe": EXPERTS,
    "granitemoehybrid": {
        **EXPERTS,
        **_MAMBA,
        "shared_intermediate_size": 24,
        "layer_types": ["mamba", "attention"],
    },
    "helium": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "jamba": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
        "use_mamba_kernels": False,
    },
    "kimi_linear": {
        **LATENT,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "q_lora_rank": None,
        "layer_types": ["linear_attention", "full_attention"],
        "mlp_layer_types": ["dense", "sparse"],
        "linear_head_dim": 8,
        "linear_num_heads": 4,
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"],
        "block_dim": 32,
        "conv_dim": 32,
    },
    "lfm2_moe": {
        **_FINE_EXPERTS,
        "layer_types": ["conv", "full_attention"],
        "num_dense_layers": 1,
    },
    "llama4_text": {
        "head_dim": 8,
        "intermediate_size_mlp": 48,
        "num_local_experts": 4,
        "num_experts_per_tok": 1,
        "attention_chunk_size": 16,
    },
    "minimax_m2": {**EXPERTS, "head_dim": 8, "rotary_dim": 8, "scoring_func": "sigmoid"},
    "ministral": {"head_dim": 8, **SLIDING},
    "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 128},
    "nanochat": {},
    "nemotron": {},
    "nemotron_h": {
        "layers_block_type": ["mamba", "attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 1,
    },
    "olmo": {},
    "olmo2": {},
    "olmo3": SLIDING,
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "persimmon": {},
    "phi": {},
    "phimoe": EXPERTS,
    "qwen2_moe": {**_FINE_EXPERTS, "shared_expert_intermediate_size": 24},
    "qwen3_5_moe_text": {
        **_FINE_EXPERTS,
        **_DELTA,
        "head_dim": 16,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3_5_text": {"head_dim": 16, **_DELTA},
    "recurrent_gemma": {"num_hidden_layers": 3, "lru_width": 32, "attention_window_size": 8},
    "seed_oss": {"head_dim": 8},
    "smollm3": {},
    "stablelm": {},
    "xglm": {"d_model": 32, "ffn_dim": 48, "num_layers": 2, "attention_heads": 4},
}
"""Families that are calibrated."""

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "codegen": ({**GPT2, "rotary_dim": 4}, r"codegen: the order of q, k and v rows"),
    "gpt_neo": (
        {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        r"GPTNeoBlock \(layer 0\): no attention found in it \(looked for",
    ),
    "jetmoe": ({"kv_channels": 8, **EXPERTS}, r"JetMoeAttention: no K projection found"),
    "longcat_flash": (
        {**ROUTED, **LATENT, "num_layers": 1, "num_hidden_layers": 2},
        r"LongcatFlashModel: no list of 2 decoder layers found",
    ),
    "mamba2": (
        {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1},
        r"Mamba2ForCausalLM: none of its 2 layers has a KV cache",
    ),
    "minimax": (
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"], "block_size": 8},
        r"MiniMaxForCausalLM \(minimax\): its forward pass takes only a cache of its own",
    ),
    "openai-gpt": (GPT2, r"Block \(layer 0\): no attention found in it \(looked for"),
    "rwkv": (
        {"attention_hidden_size": 32},
        r"RwkvForCausalLM: none of its 2 layers has a KV cache",
    ),
    "zamba2": (
        {
            "num_hidden_layers": 4,
            "layers_block_type": ["mamba", "hybrid"] * 2,
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "mamba_ngroups": 1,
            "num_mem_blocks": 1,
            "use_mamba_kernels": False,
            "attention_hidden_size": 64,
            "adapter_rank": 4,
        },
        r"Zamba2Attention at model\.layers\.3\S*: none of its weights has its own name",
    ),
}
"""Families that are not, and what the error says."""


def build(family: str, changes: dict[str, Any], *, seed: int = 0) -> PreTrainedModel:
    """Build a random fp32 model of `family` in which every parameter matters."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **{**SIZES, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.eval()


def save(family: str, changes: dict[str, Any], folder: Path) -> PreTrainedModel:
    """Build a model and write it as a checkpoint folder."""
    model = build(family, changes)
    model.save_pretrained(folder)
    return model
