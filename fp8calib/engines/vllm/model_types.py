"""The model types for which vLLM, 0.32.0 and 0.33.0, loads KV scales in another way, or not."""

from __future__ import annotations

from collections.abc import Mapping

UNSUPPORTED_TYPES = ("bamba", "diffllama", "minimax", "mpt", "xglm")
"""Model types that vLLM does not start (run); an earlier release started some of them."""
TYPES_WITHOUT_KV_SCALES = ("jamba", "lfm2", "lfm2_moe", "zamba2")
"""Model types whose `Attention` vLLM creates without a `quant_config`: it has no parameter for
a scale, and the loader fails on one (jamba, lfm2 and lfm2_moe: run in 0.32.0; zamba2: read)."""
EXPANDED_TYPES = ("minicpm3", "youtu")
"""Model types with latent attention whose K and V vLLM caches expanded to heads: vLLM's class
does so itself (minicpm3, read), or runs transformers' (youtu, run)."""

CREATED_LINEARS: Mapping[str, tuple[str, ...]] = {
    "falcon_h1": (".mamba.in_proj", ".mamba.out_proj"),
    "gemma3n_text": (
        *(".altup.correction_coefs", ".altup.modality_router", ".altup.prediction_coefs"),
        *(".laurel.linear_left", ".laurel.linear_right"),
        *(".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection"),
    ),
    "gemma4_text": (
        *(".per_layer_input_gate", ".per_layer_projection", ".per_layer_model_projection"),
    ),
    "granitemoehybrid": (".mamba.in_proj", ".mamba.out_proj"),
    "hunyuan_v1_moe": (".mlp.gate.wg",),
    "phimoe": (".block_sparse_moe.gate", ".mlp.router"),
    "qwen3_moe": (".mlp.gate",),
    "qwen3_next": tuple(
        f".linear_attn.{name}" for name in ("in_proj_qkvz", "in_proj_ba", "out_proj")
    ),
}
"""Linears outside of attention and MLPs that vLLM 0.32.0 creates by the quantization config, by
model type: the ends of their paths. Run, on tiny models."""
PLAIN_HEAD_TYPES = ("falcon_h1", "jamba", "qwen3_next")
"""Model types whose output layer vLLM 0.32.0 creates without a quantization config. Run."""
