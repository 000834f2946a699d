"""Find on a live model what `ModelGeometry` says: layers, attention, projections, experts.

Nothing is known per architecture here but the order of rows in fused q/k/v weights
(`fp8calib.model.layouts`). What cannot be told for sure is a ModelError that names the class and
what was looked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8calib.errors import ModelError
from fp8calib.geometry import Attention, Layer, Linear, ModelGeometry, Part, Section, Shard
from fp8calib.model.layouts import (
    ATTENTION_SHARDS,
    CACHELESS_LAYER_TYPES,
    CACHELESS_MIXERS,
    CONTIGUOUS_QKV,
    FUSED_GATE_UP,
    FUSED_QKV,
    INTERLEAVED_QKV,
    MLP_SHARDS,
    PRESCALED_QUERY,
    Heads,
    contiguous_qkv,
    gate_up_parts,
    grouped_qkv,
    heads_part,
    rows_part,
)

MAX_EXPERT_BLOCKS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Unobserved:
    """A weight of a decoder layer that no hook reaches, and why."""

    module: str
    why: str


@dataclass(slots=True)
class _Survey:
    """What finding the geometry needs to know about the model at hand."""

    model: PreTrainedModel
    config: Any
    prefix: str
    checkpoint_names: Mapping[str, str]
    unobserved: list[Unobserved] = field(default_factory=list)


def text_decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Find the module that turns tokens into the last hidden state, with its path."""
    decoder = model.get_decoder()
    for name, module in model.named_modules():
        if module is decoder:
            return name, module
    raise ModelError(f"{type(model).__name__}: its decoder is not one of its modules")


def find_geometry(
    model: PreTrainedModel, checkpoint_names: Mapping[str, str], *, checkpoint_dtype: str
) -> tuple[ModelGeometry, tuple[Unobserved, ...]]:
    """Describe the decoder layers of `model`.

    Args:
        model: the model, with or without weights (meta tensors will do).
        checkpoint_names: for each parameter that is one whole tensor of the checkpoint, its name.
        checkpoint_dtype: what the weights are stored in, such as `bfloat16`.

    Returns:
        The geometry, and the weights in decoder layers that calibration cannot observe.

    Raises:
        ModelError: no decoder layers, no attention in a layer that should have one, an unknown
            fused layout.
    """
    prefix, decoder = text_decoder(model)
    config = model.config.get_text_config(decoder=True)
    survey = _Survey(model, config, prefix, checkpoint_names)
    name, blocks = _decoder_layers(decoder, config.num_hidden_layers)
    path = f"{prefix}.{name}" if prefix else name
    layers: list[Layer] = []
    for index, block in enumerate(blocks):
        layers.append(_layer(survey, layers, index, f"{path}.{index}", block))
    if not any(layer.attention for layer in layers):
        raise ModelError(
            f"{type(model).__name__}: none of its {len(layers)} layers keeps a KV cache",
            hint="there is nothing to calibrate for an FP8 KV cache in this architecture",
        )
    geometry = ModelGeometry(
        architecture=type(model).__name__,
        model_type=type(config).model_type,
        checkpoint_dtype=checkpoint_dtype,
        layers=tuple(layers),
    )
    return geometry, tuple(survey.unobserved)


def _decoder_layers(decoder: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    for name, module in decoder.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == num_layers:
            return name, module
    raise ModelError(
        f"{type(decoder).__name__}: no list of {num_layers} decoder layers found in it "
        "(looked for an nn.ModuleList of num_hidden_layers blocks)"
    )


def _layer(survey: _Survey, before: list[Layer], index: int, path: str, block: nn.Module) -> Layer:
    attention, mixer = _find_mixer(survey, before, index, path, block)
    linears = tuple(_linears(survey, attention, path, block))
    return Layer(index=index, module=path, mixer=mixer, attention=attention, linears=linears)


# --- attention -------------------------------------------------------------------------------


def _find_mixer(
    survey: _Survey, before: list[Layer], index: int, path: str, block: nn.Module
) -> tuple[Attention | None, str]:
    candidates = _attention_modules(block)
    layer_type = _layer_type(survey.config, index)
    if candidates and layer_type not in CACHELESS_LAYER_TYPES:
        name, module = _only(candidates, block, index)
        return _attention(survey, before, index, f"{path}.{name}", module), type(module).__name__
    cacheless = _cacheless_mixer(block)
    if layer_type in CACHELESS_LAYER_TYPES or cacheless:
        return None, cacheless or str(layer_type)
    raise ModelError(
        f"{type(block).__name__} (layer {index}): no attention found in it (looked for a module "
        "whose class name holds 'Attention' and that has a layer_idx, or a known state-space mixer)"
    )


def _attention_modules(block: nn.Module) -> list[tuple[str, nn.Module]]:
    found: list[tuple[str, nn.Module]] = []
    for name, module in block.named_modules():
        class_name = type(module).__name__.lower()
        is_inner = any(name.startswith(f"{outer}.") for outer, _ in found)
        if "attention" not in class_name or is_inner or not hasattr(module, "layer_idx"):
            continue
        if not any(map(_is_linear, module.children())):
            continue  # a wrapper around attention and its norms
        if not any(part in class_name for part in CACHELESS_MIXERS):
            found.append((name, module))
    return found


def _only(
    candidates: list[tuple[str, nn.Module]], block: nn.Module, index: int
) -> tuple[str, nn.Module]:
    if len(candidates) == 1:
        return candidates[0]
    names = ", ".join(name for name, _ in candidates)
    raise ModelError(
        f"{type(block).__name__} (layer {index}): {len(candidates)} attention modules ({names}) "
        "where one was looked for"
    )


def _layer_type(config: Any, index: int) -> str | None:
    layer_types = getattr(config, "layer_types", None)
    return layer_types[index] if layer_types else None


def _cacheless_mixer(block: nn.Module) -> str:
    for module in block.modules():
        class_name = type(module).__name__
        if any(part in class_name.lower() for part in CACHELESS_MIXERS):
            return class_name
    return ""


def _attention(
    survey: _Survey, before: list[Layer], index: int, path: str, module: nn.Module
) -> Attention:
    producer = _producer(survey.config, before, index, module)
    latent = _is_latent(survey.config, module)
    heads = _heads(survey.config, module, None if producer is None else before[producer])
    sliding = _layer_type(survey.config, index) == "sliding_attention" or (
        getattr(survey.config, "layer_types", None) is None
    )
    scale = heads.k_head_dim**-0.5 if survey.config.model_type in PRESCALED_QUERY else 1.0
    return Attention(
        module=path,
        checkpoint_module=_checkpoint_module(survey, path, module),
        kind="latent" if latent else "heads",
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        k_head_dim=heads.k_head_dim,
        v_head_dim=heads.v_head_dim,
        sliding_window=getattr(survey.config, "sliding_window", None) if sliding else None,
        producer=producer,
        query_divisor=scale,
    )


def _checkpoint_module(survey: _Survey, path: str, module: nn.Module) -> str:
    """Spell the module's path as the checkpoint does, from the name of one of its weights."""
    for name, _ in module.named_parameters():
        stored = survey.checkpoint_names.get(f"{path}.{name}")
        if stored is not None and stored.endswith(f".{name}"):
            return stored.removesuffix(f".{name}")
    raise ModelError(
        f"{type(module).__name__} at {path}: none of its weights stands in the checkpoint under "
        "its own name, so the scales cannot be named either"
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
        f"{type(module).__name__} (layer {index}) reads another layer's K/V, but no earlier layer "
        f"of type {layer_type} keeps one"
    )


def _is_latent(config: Any, module: nn.Module) -> bool:
    return getattr(config, "kv_lora_rank", None) is not None and hasattr(module, "kv_b_proj")


def _heads(config: Any, module: nn.Module, producer: Layer | None) -> Heads:
    num_heads = _num_heads(config, module)
    if producer is not None and producer.attention is not None:
        source = producer.attention
        return Heads(
            num_heads=num_heads,
            num_kv_heads=source.num_kv_heads,
            k_head_dim=source.k_head_dim,
            v_head_dim=source.v_head_dim,
        )
    if _is_latent(config, module):
        return Heads(
            num_heads=num_heads,
            num_kv_heads=1,
            k_head_dim=config.kv_lora_rank,
            v_head_dim=config.qk_rope_head_dim,
        )
    return _heads_from_weights(config, module, num_heads)


def _heads_from_weights(config: Any, module: nn.Module, num_heads: int) -> Heads:
    sizes = {
        name: _features(linear) for name, linear in module.named_children() if _is_linear(linear)
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
        raise ModelError(f"{type(module).__name__}: cannot tell its KV heads from {sizes}")
    return Heads(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        k_head_dim=head_dim,
        v_head_dim=v_head_dim,
    )


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


# --- projections -----------------------------------------------------------------------------


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


def _features(module: nn.Module) -> tuple[int, int]:
    """Give (in, out) features; a Conv1D's weight is stored [in, out]."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if isinstance(module, Conv1D) else (columns, rows)


def is_transposed(module: nn.Module) -> bool:
    """Whether the module's weight is stored [in, out]."""
    return isinstance(module, Conv1D)


def _linears(
    survey: _Survey, attention: Attention | None, path: str, block: nn.Module
) -> Iterator[Linear]:
    experts = {name for name, module in block.named_modules() if is_experts(module)}
    for name, module in block.named_modules():
        full = f"{path}.{name}"
        if name in experts:
            yield from _expert_linears(path, name, module)
        elif _is_linear(module):
            yield _linear(survey, attention, path, name, module)
        elif why := _unreachable(module, survey.config.hidden_size):
            survey.unobserved.append(Unobserved(module=full, why=why))


def _is_heavy(parameter: nn.Parameter, hidden_size: int) -> bool:
    """Tell stacked experts (3-D, or 2-D with all experts' rows) from routers and norms."""
    return parameter.dim() >= 3 or (parameter.dim() == 2 and min(parameter.shape) >= hidden_size)


def _unreachable(module: nn.Module, hidden_size: int) -> str:
    """Say why the weights a module itself holds cannot be observed; empty when it has none."""
    if isinstance(module, nn.Embedding) or type(module).__module__.startswith("torch.nn"):
        return ""
    heavy = [n for n, p in module.named_parameters(recurse=False) if _is_heavy(p, hidden_size)]
    if not heavy:
        return ""
    return (
        f"{type(module).__name__} multiplies by {', '.join(heavy)} itself, through neither a "
        "linear module nor transformers' experts interface"
    )


def _linear(
    survey: _Survey, attention: Attention | None, path: str, name: str, module: nn.Module
) -> Linear:
    full = f"{path}.{name}"
    in_features, out_features = _features(module)
    suffix = name.rpartition(".")[2]
    section, root, shard, parts = _classify(survey, attention, path, name, (suffix, out_features))
    return Linear(
        module=full,
        section=section,
        root=root,
        in_features=in_features,
        out_features=out_features,
        shard=shard,
        parts=parts,
        weight_name=f"{full}.weight",
        checkpoint_name=survey.checkpoint_names.get(f"{full}.weight"),
    )


_Classified = tuple[Section, str, Shard, tuple[Part, ...]]


def _classify(
    survey: _Survey, attention: Attention | None, path: str, name: str, linear: tuple[str, int]
) -> _Classified:
    suffix, out_features = linear
    full = f"{path}.{name}"
    if attention is not None and full.startswith(f"{attention.module}."):
        return _classify_attention(survey, attention, suffix, out_features)
    head, _, rest = name.partition(".")
    mlp_root = f"{path}.{head}" if rest else path
    if suffix in MLP_SHARDS and "attn" not in head and "attention" not in head:
        parts = _mlp_parts(suffix, out_features)
        return "mlp", mlp_root, MLP_SHARDS[suffix], parts
    return "other", path, "replicated", (rows_part(suffix, out_features),)


def _mlp_parts(suffix: str, out_features: int) -> tuple[Part, ...]:
    if suffix in FUSED_GATE_UP:
        return gate_up_parts(out_features)
    return (rows_part(suffix, out_features),)


def _classify_attention(
    survey: _Survey, attention: Attention, suffix: str, out_features: int
) -> _Classified:
    if suffix in FUSED_QKV and suffix not in ATTENTION_SHARDS:
        parts: tuple[Part, ...] = _fused_qkv(survey, attention, suffix)
        return "attention", attention.module, "column", parts
    if suffix not in ATTENTION_SHARDS:
        return "other", attention.module, "replicated", (rows_part(suffix, out_features),)
    shard = ATTENTION_SHARDS[suffix]
    if shard != "column":
        return "attention", attention.module, shard, (rows_part(suffix, out_features),)
    is_kv = suffix in {"k_proj", "v_proj"}
    num_heads = attention.num_kv_heads if is_kv else attention.num_heads
    return "attention", attention.module, shard, (heads_part(suffix, num_heads, out_features),)


def _fused_qkv(survey: _Survey, attention: Attention, suffix: str) -> tuple[Part, ...]:
    heads = Heads(
        num_heads=attention.num_heads,
        num_kv_heads=attention.num_kv_heads,
        k_head_dim=attention.k_head_dim,
        v_head_dim=attention.v_head_dim,
    )
    family = survey.config.model_type
    if family == "falcon":
        is_grouped = survey.config.new_decoder_architecture or not survey.config.multi_query
        return grouped_qkv(heads) if is_grouped else contiguous_qkv(heads)
    if family == "gpt_bigcode" and not survey.config.multi_query:
        return grouped_qkv(heads)
    if family in CONTIGUOUS_QKV:
        return contiguous_qkv(heads)
    if family in INTERLEAVED_QKV:
        return grouped_qkv(heads)
    raise ModelError(
        f"{survey.config.model_type}: the order of q, k and v rows inside {attention.module}."
        f"{suffix} is not known (looked for the family in fp8calib.model.layouts)"
    )


# --- experts ---------------------------------------------------------------------------------


def is_experts(module: nn.Module) -> bool:
    """Whether transformers runs this module through its experts interface."""
    return (
        hasattr(module, "is_transposed")
        and hasattr(module, "has_gate")
        and (hasattr(module, "down_proj"))
    )


def _expert_linears(path: str, name: str, module: nn.Module) -> Iterator[Linear]:
    full = f"{path}.{name}"
    owner: Any = module
    head, _, rest = name.partition(".")
    fused = "gate_up_proj" if owner.has_gate else "up_proj"
    hidden, intermediate = _expert_sizes(owner)
    names = ("gate_proj", "up_proj", "down_proj") if owner.has_gate else ("up_proj", "down_proj")
    block = expert_block(intermediate)
    for suffix in names:
        is_down = suffix == "down_proj"
        weight_name = f"{full}.{'down_proj' if is_down else fused}"
        yield Linear(
            module=f"{full}.{suffix}",
            section="mlp",
            root=f"{path}.{head}" if rest else path,
            in_features=intermediate if is_down else hidden,
            out_features=hidden if is_down else intermediate,
            shard="row" if is_down else "column",
            parts=(rows_part(suffix, hidden if is_down else intermediate),),
            num_experts=int(owner.down_proj.shape[0]),
            expert_block=block,
            weight_name=weight_name,
            checkpoint_name=None,
        )


def _expert_sizes(experts: Any) -> tuple[int, int]:
    _, rows, columns = experts.down_proj.shape
    return (columns, rows) if experts.is_transposed else (rows, columns)


def expert_block(intermediate: int) -> int:
    """Choose how many channels share one stored amax per expert.

    Among the block counts up to 256 that divide the intermediate size, the one that the most
    tensor-parallel degrees divide; the finer one when equal.
    """
    counts = [
        n for n in range(1, min(intermediate, MAX_EXPERT_BLOCKS) + 1) if intermediate % n == 0
    ]
    best = max(counts, key=lambda n: (sum(n % tp == 0 for tp in range(1, n + 1)), n))
    return intermediate // best
