"""Which models a type of the KV cache stores, and the bytes of a token in it."""

from __future__ import annotations

from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.kv_types.cache_types import CACHE_TYPES, CacheType


def explain_misfit(cache_type: CacheType, geometry: ModelGeometry) -> str:
    """Say why a type cannot store the cache of a model; empty where it can."""
    named = cache_type.latent_types
    if named and geometry.model_type not in named:
        return f"it stores the latents of {', '.join(named)} alone"
    if geometry.model_type in cache_type.refused_types:
        return f"the engine does not start with it and {geometry.model_type}"
    for _, attention in geometry.attentions():
        if attention.kind == "latent" and not named:
            return "the model caches latents, which it does not store"
        for size in (attention.k_head_dim, *(() if named else (attention.v_head_dim,))):
            if why := cache_type.explain_misfit(size):
                return why
    if not geometry.kv_elements_per_token:
        return "the model has no KV cache"
    return "" if list_stored(cache_type, geometry) else "it leaves all layers in 16 bits"


def count_cache_bytes(name: str, geometry: ModelGeometry) -> float:
    """Count the bytes of a token in all layers and on all ranks, in a type or in FP8."""
    return sum(count_layer_bytes(name, each, geometry) for _, each in geometry.attentions())


def count_layer_bytes(name: str, attention: Attention, geometry: ModelGeometry) -> float:
    """Count the bytes of a token in a layer, in a type or in FP8; without a name in 16 bits."""
    cache_type = CACHE_TYPES.get(name)
    if not name or (cache_type and attention not in list_stored(cache_type, geometry)):
        return 2.0 * attention.kv_elements_per_token
    if cache_type is None or attention.producer is not None:
        return float(attention.kv_elements_per_token)
    one = cache_type.count_key_bytes(attention.k_head_dim)
    one += cache_type.count_value_bytes(attention.v_head_dim)
    return attention.num_kv_heads * one


def list_stored(cache_type: CacheType, geometry: ModelGeometry) -> list[Attention]:
    """List the attention layers whose K and V the type stores: not the ends that it leaves."""
    attentions = [attention for _, attention in geometry.attentions()]
    ends = min(cache_type.num_plain_ends, len(attentions) // 2)
    is_hybrid = len(attentions) < len(geometry.layers)
    return attentions if is_hybrid or not ends else attentions[ends:-ends]
