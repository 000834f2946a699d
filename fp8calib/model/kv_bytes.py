"""The size of a KV cache, from a geometry, or for an unknown model from its config.json."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.checkpoint.model_config import LAYER_COUNTS, list_text_configs
from fp8calib.model.geometry import ModelGeometry

_WITHOUT_CACHE = ("linear", "mamba", "conv", "recurrent", "moe", "mlp")
_WIDE_DTYPES = {"float32": 4, "float64": 8}


def kv_bytes_per_token(geometry: ModelGeometry) -> tuple[int, int]:
    """Give the bytes of KV cache per token over all layers and ranks, before and in FP8."""
    elements = geometry.kv_elements_per_token
    return elements * _WIDE_DTYPES.get(geometry.checkpoint_dtype, 2), elements


def estimate_kv_bytes(config: Mapping[str, object], dtype: str) -> tuple[int, int] | None:
    """Give the bytes of KV cache per token over all layers, in the model's dtype and in FP8.

    None if the config has no usual key for the number of layers, of heads or for their size. Layers
    that read another layer's cache count as if they had their own.
    """
    fields = dict(pair for _, part in list_text_configs(config) for pair in part.items())

    def take(*names: str) -> int | None:
        values = (fields.get(name) for name in names)
        return next((value for value in values if type(value) is int and value > 0), None)

    kinds, layers = fields.get("layer_types"), take(*LAYER_COUNTS)
    if isinstance(kinds, list):
        layers = sum(not any(mark in str(kind) for mark in _WITHOUT_CACHE) for kind in kinds)
    heads = take("num_attention_heads", "n_head", "n_heads")
    kv_heads = take("num_key_value_heads", "num_kv_heads") or heads
    hidden = take("hidden_size", "n_embd", "d_model")
    head_dim = take("head_dim") or (hidden // heads if hidden and heads else None)
    latent, rotary = take("kv_lora_rank"), take("qk_rope_head_dim")
    elements = 2 * kv_heads * head_dim if kv_heads and head_dim else None
    if latent and rotary:
        elements = latent + rotary
    if layers is None or elements is None:
        return None
    return layers * elements * _WIDE_DTYPES.get(dtype, 2), layers * elements
