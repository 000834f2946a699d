"""Find the token mixer of a decoder layer, and the K/V heads that it caches."""

from __future__ import annotations

from typing import Any

from torch import nn

from fp8calib.errors import ModelError
from fp8calib.model.shapes import Attention, Layer
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

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")


def find_mixer(
    search: GeometrySearch, before: list[Layer], index: int, path: str, block: nn.Module
) -> tuple[Attention | None, str]:
    """Find a layer's attention (None if it caches no K and V) and the class name of its mixer.

    Raises:
        ModelError: there is neither attention nor a known cacheless mixer, or the attention is not
            supported.
    """
    where = f"{type(block).__name__} (layer {index})"
    layer_type = search.layer_type(index)
    candidates = _attention_modules(search, block)
    if candidates and layer_type not in CACHELESS_LAYER_TYPES:
        if len(candidates) > 1:
            raise ModelError(
                f"{where}: {len(candidates)} attention modules ({', '.join(candidates)}) where one "
                "was expected"
            )
        ((name, module),) = candidates.items()
        return _attention(search, before, index, f"{path}.{name}", module), name_class(module)
    for name_of in (search.class_name, name_class):  # without the family's name first
        for module in block.modules():
            if any(part in name_of(module).lower() for part in CACHELESS_MIXERS):
                return None, name_class(module)
    if layer_type in CACHELESS_LAYER_TYPES:
        return None, str(layer_type)
    raise ModelError(
        f"{where}: no attention found in it (looked for a module whose class name contains "
        "'Attention' and that has a layer_idx, or a known state-space mixer)"
    )


def _attention_modules(search: GeometrySearch, block: nn.Module) -> dict[str, nn.Module]:
    found: dict[str, nn.Module] = {}
    for name, module in block.named_modules():
        class_name = search.class_name(module).lower()
        is_inner = any(name.startswith(f"{outer}.") for outer in found)
        if "attention" not in class_name or is_inner or not hasattr(module, "layer_idx"):
            continue
        if not any(map(is_linear, module.children())):
            continue  # a wrapper around attention and its norms
        if not any(part in class_name for part in CACHELESS_MIXERS):
            found[name] = module
    return found


def _attention(
    search: GeometrySearch, before: list[Layer], index: int, path: str, module: nn.Module
) -> Attention:
    config = search.config
    producer = _producer(search, before, index, module)
    is_latent = getattr(config, "kv_lora_rank", None) is not None and hasattr(module, "kv_b_proj")
    heads = (getattr(module, name, None) for name in _HEAD_COUNTS)
    num_heads = next((value for value in heads if isinstance(value, int)), None)
    num_heads = int(config.num_attention_heads) if num_heads is None else num_heads
    if producer is not None and (owner := before[producer].attention) is not None:
        num_kv_heads, k_head_dim, v_head_dim = (
            owner.num_kv_heads,
            owner.k_head_dim,
            owner.v_head_dim,
        )
    elif is_latent:
        num_kv_heads, k_head_dim, v_head_dim = 1, config.kv_lora_rank, config.qk_rope_head_dim
    else:
        num_kv_heads, k_head_dim, v_head_dim = _kv_heads(config, module, num_heads)
    # without layer_types a window is that of every layer
    has_window = search.layer_type(index) == "sliding_attention" or (
        getattr(config, "layer_types", None) is None
    )
    return Attention(
        module=path,
        checkpoint_module=_checkpoint_module(search, path, module),
        kind="latent" if is_latent else "heads",
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_head_dim=k_head_dim,
        v_head_dim=v_head_dim,
        sliding_window=getattr(config, "sliding_window", None) if has_window else None,
        producer=producer,
        query_divisor=k_head_dim**-0.5 if config.model_type in PRESCALED_QUERY else 1.0,
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


def _producer(
    search: GeometrySearch, before: list[Layer], index: int, module: nn.Module
) -> int | None:
    """Find the layer whose K and V a layer reads; None if it has its own."""
    if not getattr(module, "is_kv_shared_layer", False):
        return None
    named = getattr(module, "kv_shared_layer_index", None)
    if named is not None:
        return int(named)
    layer_type = search.layer_type(index)
    for layer in reversed(before):
        owns = layer.attention is not None and layer.attention.producer is None
        if owns and search.layer_type(layer.index) == layer_type:
            return layer.index
    raise ModelError(
        f"{type(module).__name__} (layer {index}) uses another layer's K/V, but no earlier layer "
        f"of type {layer_type} caches them"
    )


def _kv_heads(config: Any, module: nn.Module, num_heads: int) -> tuple[int, int, int]:
    """Find the number of KV heads, and the sizes of a head of K and of V."""
    sizes = {
        name: linear_features(linear)
        for name, linear in module.named_children()
        if is_linear(linear)
    }
    stated = (getattr(owner, "head_dim", None) for owner in (module, config))
    head_dim = next((value for value in stated if isinstance(value, int)), None)
    if head_dim is None:
        output = next((sizes[name][0] for name in _OUTPUTS if name in sizes), None)
        head_dim = (int(config.hidden_size) if output is None else output) // num_heads
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
