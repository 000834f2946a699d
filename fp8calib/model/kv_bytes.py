"""The size of a KV cache, from a geometry, or for an unknown model from its config.json."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.checkpoint.model_config import LAYER_COUNTS, list_text_configs
from fp8calib.model.shapes import ModelGeometry

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
    layers, elements = _count_layers(fields), _count_elements(fields)
    if layers is None or elements is None:
        return None
    size = _WIDE_DTYPES.get(dtype, 2)
    return layers * elements * size, layers * elements


def _count_layers(fields: Mapping[str, object]) -> int | None:
    kinds = fields.get("layer_types")
    if isinstance(kinds, list):
        return sum(not any(mark in str(kind) for mark in _WITHOUT_CACHE) for kind in kinds)
    return _take(fields, *LAYER_COUNTS)


def _count_elements(fields: Mapping[str, object]) -> int | None:
    """Give how many numbers one layer caches per token."""
    latent, rotary = _take(fields, "kv_lora_rank"), _take(fields, "qk_rope_head_dim")
    if latent is not None and rotary is not None:
        return latent + rotary
    heads = _take(fields, "num_attention_heads", "n_head", "n_heads")
    kv_heads = _take(fields, "num_key_value_heads", "num_kv_heads") or heads
    hidden = _take(fields, "hidden_size", "n_embd", "d_model")
    size = _take(fields, "head_dim") or (hidden // heads if hidden and heads else None)
    return None if kv_heads is None or size is None else 2 * kv_heads * size


def _take(fields: Mapping[str, object], *names: str) -> int | None:
    found = (fields.get(name) for name in names)
    return next((value for value in found if type(value) is int and value > 0), None)
