"""Find the token mixer of a decoder layer, and the K/V heads that it caches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fp8calib.errors import ModelError
from fp8calib.geometry.model_geometry import Attention, Layer
from fp8calib.model.topology.layouts import (
    CACHELESS_LAYER_TYPES,
    CACHELESS_MIXERS,
    FUSED_QKV,
    PRESCALED_QUERY,
)
from fp8calib.model.topology.search import (
    GeometrySearch,
    is_linear,
    linear_features,
    name_class,
)


def find_mixer(
    search: GeometrySearch, before: list[Layer], index: int, path: str, block: nn.Module
) -> tuple[Attention | None, str]:
    """Find a layer's attention (None if it caches no K and V) and the class name of its mixer.

    Raises:
        ModelError: there is neither attention nor a known cacheless mixer, or the attention is not
            supported.
    """
    candidates = _attention_modules(search, block)
    layer_type = _layer_type(search.config, index)
    if candidates and layer_type not in CACHELESS_LAYER_TYPES:
        name, module = _single_attention(candidates, block, index)
        return _attention(search, before, index, f"{path}.{name}", module), name_class(module)
    cacheless = _cacheless_mixer(search, block)
    if layer_type in CACHELESS_LAYER_TYPES or cacheless:
        return None, cacheless or str(layer_type)
    raise ModelError(
        f"{type(block).__name__} (layer {index}): no attention found in it (looked for a module "
        "whose class name contains 'Attention' and that has a layer_idx, or a known state-space "
        "mixer)"
    )


def _attention_modules(search: GeometrySearch, block: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in block.named_modules():
        class_name = search.class_name(module).lower()
        is_inner = any(name.startswith(f"{outer}.") for outer, _ in found)
        if "attention" not in class_name or is_inner or not hasattr(module, "layer_idx"):
            continue
        if not any(map(is_linear, module.children())):
            continue  # a wrapper around attention and its norms
        if not any(part in class_name for part in CACHELESS_MIXERS):
            found.append((name, module))
    return found


def _single_attention(
    candidates: list[tuple[str, nn.Module]], block: nn.Module, index: int
) -> tuple[str, nn.Module]:
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(name for name, _ in candidates)
    raise ModelError(
        f"{type(block).__name__} (layer {index}): {len(candidates)} attention modules ({names}) "
        "where one was expected"
    )


def _layer_type(config: Any, index: int) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    return layer_types[index] if layer_types else None


def _cacheless_mixer(search: GeometrySearch, block: nn.Module) -> str:
    """Find the class of a mixer without K and V, first by class names without the family's name."""
    for name_of in (search.class_name, name_class):
        for module in block.modules():
            if any(part in name_of(module).lower() for part in CACHELESS_MIXERS):
                return name_class(module)
    return ""


def _attention(
    search: GeometrySearch, before: list[Layer], index: int, path: str, module: nn.Module
) -> Attention:
    producer = _producer(search.config, before, index, module)
    latent = _is_latent(search.config, module)
    num_heads = _num_heads(search.config, module)
    source = None if producer is None else before[producer].attention
    num_kv_heads, k_head_dim, v_head_dim = _kv_heads(search.config, module, num_heads, source)
    sliding = _layer_type(search.config, index) == "sliding_attention" or (
        getattr(search.config, "layer_types", None) is None
    )
    scale = k_head_dim**-0.5 if search.config.model_type in PRESCALED_QUERY else 1.0
    return Attention(
        module=path,
        checkpoint_module=_checkpoint_module(search, path, module),
        kind="latent" if latent else "heads",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
        sliding_window=getattr(search.config, "sliding_window", None) if sliding else None,
        producer=producer,
        query_divisor=scale,
    )


def _checkpoint_module(search: GeometrySearch, path: str, module: nn.Module) -> str:
    """Find the module's path in the checkpoint, from the name of one of its weights."""
    for name, _ in module.named_parameters():
        stored = search.checkpoint_names.get(f"{path}.{name}")
        if stored is not None and stored.endswith(f".{name}"):
            return stored.removesuffix(f".{name}")
    raise ModelError(
        f"{type(module).__name__} at {path}: none of its weights has its own name in the "
        "checkpoint, so its scales cannot be named"
    )


def _producer(config: Any, before: list[Layer], index: int, module: nn.Module) -> int | None:
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    named = getattr(module, "kv_shared_layer_index", None)
    if named is not None:
        return int(named)
    layer_type = _layer_type(config, index)
    for layer in reversed(before):
        owns = layer.attention is not None and layer.attention.producer is None
        if owns and _layer_type(config, layer.index) == layer_type:
            return layer.index
    raise ModelError(
        f"{type(module).__name__} (layer {index}) uses another layer's K/V, but no earlier layer "
        f"of type {layer_type} caches them"
    )


def _is_latent(config: Any, module: nn.Module) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None and hasattr(module, "kv_b_proj")


def _kv_heads(
    config: Any, module: nn.Module, num_heads: int, producer: Attention | None
) -> tuple[int, int, int]:
    """Find the number of KV heads, and the sizes of a head of K and of V."""
    if producer is not None:
        return producer.num_kv_heads, producer.k_head_dim, producer.v_head_dim
    if _is_latent(config, module):
        return 1, config.kv_lora_rank, config.qk_rope_head_dim
    sizes = {
        name: linear_features(linear)
        for name, linear in module.named_children()
        if is_linear(linear)
    }
    head_dim = _head_dim(config, module, sizes, num_heads)
    fused = next((name for name in FUSED_QKV if name in sizes), None)
    if fused is not None:
        num_kv_heads = (sizes[fused][1] // head_dim - num_heads) // 2
        v_head_dim = head_dim
    elif "k_proj" in sizes:
        num_kv_heads = sizes["k_proj"][1] // head_dim
        v_head_dim = sizes.get("v_proj", sizes["k_proj"])[1] // max(num_kv_heads, 1)
    else:
        raise ModelError(
            f"{type(module).__name__}: no K projection found (looked for k_proj or one of "
            f"{', '.join(FUSED_QKV)}; it holds {', '.join(sizes) or 'no linear'})"
        )
    if num_kv_heads < 1:
        raise ModelError(f"{type(module).__name__}: cannot determine its KV heads from {sizes}")
    return num_kv_heads, head_dim, v_head_dim


def _num_heads(config: Any, module: nn.Module) -> int:
    for name in ("num_heads", "num_attention_heads", "n_heads", "n_head"):
        if isinstance(value := getattr(module, name, None), int):
            return value
    return int(config.num_attention_heads)


def _head_dim(
    config: Any, module: nn.Module, sizes: Mapping[str, tuple[int, int]], num_heads: int
) -> int:
    for owner in (module, config):
        if isinstance(value := getattr(owner, "head_dim", None), int):
            return value
    outputs = [
        sizes[name][0] for name in ("o_proj", "out_proj", "dense", "c_proj") if name in sizes
    ]
    return (outputs[0] if outputs else int(config.hidden_size)) // num_heads
