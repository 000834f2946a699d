"""Find the geometry of a model from its modules: layers, attention, projections and experts.

The only facts known per architecture are in `layouts`, such as the order of rows in fused q/k/v
weights. Anything ambiguous is a ModelError that names the class and what was searched for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import signature
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from fp8calib.errors import Fp8CalibError, ModelError, first_line
from fp8calib.model.geometry import Attention, Layer, Linear, ModelGeometry, Part, Section, Shard
from fp8calib.model.layouts import (
    ATTENTION_SHARDS,
    CACHELESS_LAYER_TYPES,
    CACHELESS_MIXERS,
    FUSED_GATE_UP,
    FUSED_QKV,
    MLP_SHARDS,
    PRESCALED_QUERY,
    gate_up_parts,
    qkv_parts,
)

_HEAD_COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head")
_OUTPUTS = ("o_proj", "out_proj", "dense", "c_proj")
_MOST_BLOCKS = 256

# --- single modules ------------------------------------------------------------------------------


def name_class(module: nn.Module) -> str:
    """Give the name of a module's class; `fully_shard` puts another one before it."""
    classes = type(module).__mro__
    return next(each for each in classes if not issubclass(each, FSDPModule)).__name__


def is_linear(module: nn.Module) -> bool:
    """Tell whether the module is a linear projection: nn.Linear, or GPT-2's Conv1D."""
    return isinstance(module, nn.Linear | Conv1D)


def is_transposed(module: nn.Module) -> bool:
    """Tell whether the module's weight is stored [in, out]."""
    return isinstance(module, Conv1D)


def is_matrix(parameter: nn.Parameter) -> bool:
    """Tell whether at least two of its dimensions hold more than one element."""
    return sum(size > 1 for size in parameter.shape) > 1


def is_experts(module: nn.Module) -> bool:
    """Tell whether transformers runs this module by its experts interface."""
    return all(hasattr(module, name) for name in ("is_transposed", "has_gate", "down_proj"))


def find_text_decoder(model: PreTrainedModel) -> tuple[str, nn.Module]:
    """Find the module that computes the last hidden state from tokens, with its path."""
    decoder = model.get_decoder()
    if isinstance(decoder, nn.Linear):  # modernbert-decoder's output layer has this name
        decoder = model.base_model
    if isinstance(decoder, PreTrainedModel) and decoder.get_output_embeddings() is not None:
        # Llama4ForCausalLM names itself, lm_head included, as its decoder
        inner = [child for child in decoder.children() if isinstance(child, PreTrainedModel)]
        decoder = inner[0] if len(inner) == 1 else decoder
    for name, module in model.named_modules():
        if module is decoder:
            return name, module
    raise ModelError(f"{type(model).__name__}: get_decoder() gives none of its modules")


def name_cache_argument(decoder: nn.Module) -> str:
    """Name the argument of a forward pass that takes the cache; the output has it by that name.

    Transformers 5.24 renamed `past_key_values`, which it still takes, with a warning.
    """
    parameters = signature(decoder.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


# --- geometry ------------------------------------------------------------------------------------


def find_geometry(
    model: PreTrainedModel, checkpoint_names: Mapping[str, str], *, checkpoint_dtype: str
) -> tuple[ModelGeometry, Mapping[str, str]]:
    """Describe the decoder layers of `model`.

    Args:
        model: the model, with or without weights (meta tensors suffice).
        checkpoint_names: parameter -> name of its tensor, if it is one whole tensor.
        checkpoint_dtype: the dtype of the stored weights, such as `bfloat16`.

    Returns:
        The geometry, and the modules in decoder layers whose weights calibration cannot observe,
        with the reason.

    Raises:
        ModelError: there are no decoder layers, a layer has neither attention nor a known other
            mixer, or a fused layout is unknown.
    """
    prefix, decoder = find_text_decoder(model)
    try:
        search = _Search(model, prefix, decoder, checkpoint_names)
    except Fp8CalibError:
        raise
    except Exception as error:
        raise ModelError(
            f"{type(model).__name__}: its layers are not understood: {first_line(error)}",
            hint="this architecture is not supported",
        ) from error
    if not any(layer.attention for layer in search.layers):
        raise ModelError(
            f"{type(model).__name__}: none of its {len(search.layers)} layers has a KV cache",
            hint="this architecture has no KV cache to calibrate",
        )
    drafters = getattr(search.config, "num_nextn_predict_layers", None)
    geometry = ModelGeometry(
        architecture=name_class(model),
        model_type=type(search.config).model_type,
        checkpoint_dtype=checkpoint_dtype,
        layers=tuple(search.layers),
        num_draft_layers=max(drafters, 0) if isinstance(drafters, int) else 0,
    )
    return geometry, search.unobserved


class _Search:
    """The layers found so far, and the modules whose weights no hook can observe, with reasons."""

    def __init__(
        self,
        model: PreTrainedModel,
        prefix: str,
        decoder: nn.Module,
        checkpoint_names: Mapping[str, str],
    ) -> None:
        self.layers: list[Layer] = []
        self.unobserved: dict[str, str] = {}
        self.config: Any = model.config.get_text_config(decoder=True)
        self._names = checkpoint_names
        self._types: Any = getattr(self.config, "layer_types", None)
        # the prefix of the names of the model's classes, such as `KimiLinear`
        self._family = name_class(decoder).removesuffix("Model")
        count, lists = self.config.num_hidden_layers, list[str]()
        for path, blocks in decoder.named_modules():
            # lists inside the elements of a list do not count
            if isinstance(blocks, nn.ModuleList) and not path.startswith(tuple(lists)):
                if len(blocks) == count:
                    break
                lists.append(f"{path}.")
        else:
            raise ModelError(
                f"{type(decoder).__name__}: no list of {count} decoder layers found (looked for an "
                "nn.ModuleList of num_hidden_layers blocks)"
            )
        for index, block in enumerate(blocks.children()):
            module = ".".join(filter(None, (prefix, path, str(index))))
            attention, mixer = self._find_mixer(index, module, block)
            linears = tuple(self._list_linears(attention, module, block))
            self.layers.append(
                Layer(index=index, module=module, mixer=mixer, attention=attention, linears=linears)
            )

    def _find_mixer(self, index: int, path: str, block: nn.Module) -> tuple[Attention | None, str]:
        """Find a layer's attention (None if it caches no K and V) and the class of its mixer."""
        where = f"{type(block).__name__} (layer {index})"
        layer_type = self._types[index] if self._types else None
        found: dict[str, nn.Module] = {}
        mixers: list[nn.Module] = []
        for name, module in block.named_modules():
            class_name = name_class(module).removeprefix(self._family).lower()
            if any(part in class_name for part in CACHELESS_MIXERS):
                mixers.append(module)
            elif (
                "attention" in class_name
                and hasattr(module, "layer_idx")
                and not any(name.startswith(f"{outer}.") for outer in found)
                and any(map(is_linear, module.children()))  # else a wrapper of attention and norms
            ):
                found[name] = module
        is_cached = bool(found) and layer_type not in CACHELESS_LAYER_TYPES
        if is_cached and len(found) == 1:
            ((name, module),) = found.items()
            return self._describe_attention(index, f"{path}.{name}", module), name_class(module)
        mixers += [] if is_cached else block.modules()  # now also by the family's name
        for module in [] if is_cached else mixers:
            if any(part in name_class(module).lower() for part in CACHELESS_MIXERS):
                return None, name_class(module)
        if layer_type in CACHELESS_LAYER_TYPES:
            return None, str(layer_type)
        what = f"{len(found)} attention modules ({', '.join(found)})" if found else "no attention"
        raise ModelError(
            f"{where}: {what} found in it (looked for a module whose class name contains "
            "'Attention' and that has a layer_idx, or a known state-space mixer)"
        )

    def _describe_attention(self, index: int, path: str, module: nn.Module) -> Attention:
        config = self.config
        producer = self._find_producer(index, module)
        is_latent = getattr(config, "kv_lora_rank", None) is not None
        is_latent = is_latent and hasattr(module, "kv_b_proj")
        counts = (getattr(module, name, None) for name in _HEAD_COUNTS)
        num_heads = next((value for value in counts if isinstance(value, int)), None)
        num_heads = int(config.num_attention_heads) if num_heads is None else num_heads
        if producer is not None and (owner := self.layers[producer].attention) is not None:
            sizes = owner.num_kv_heads, owner.k_head_dim, owner.v_head_dim
        elif is_latent:
            sizes = 1, config.kv_lora_rank, config.qk_rope_head_dim
        else:
            sizes = _find_kv_heads(config, module, num_heads)
        num_kv_heads, k_head_dim, v_head_dim = sizes
        # without layer_types a window is that of every layer
        has_window = self._types is None or (
            bool(self._types) and self._types[index] == "sliding_attention"
        )
        return Attention(
            module=path,
            checkpoint_module=self._find_stored_path(path, module),
            kind="latent" if is_latent else "heads",
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            k_head_dim=k_head_dim,
            v_head_dim=v_head_dim,
            sliding_window=getattr(config, "sliding_window", None) if has_window else None,
            producer=producer,
            query_divisor=k_head_dim**-0.5 if config.model_type in PRESCALED_QUERY else 1.0,
        )

    def _find_stored_path(self, path: str, module: nn.Module) -> str:
        """Find the module's path in the checkpoint, from the name of one of its weights."""
        for name, _ in module.named_parameters():
            stored = self._names.get(f"{path}.{name}")
            if stored is not None and stored.endswith(f".{name}"):
                return stored.removesuffix(f".{name}")
        raise ModelError(
            f"{type(module).__name__} at {path}: none of its weights has its own name in the "
            "checkpoint, so its scales cannot be named"
        )

    def _find_producer(self, index: int, module: nn.Module) -> int | None:
        """Find the layer whose K and V a layer reads; None if it has its own."""
        if not getattr(module, "is_kv_shared_layer", False):
            return None
        named = getattr(module, "kv_shared_layer_index", None)
        if named is not None:
            return int(named)
        types = self._types or [None] * (index + 1)
        return next(  # every class with such a layer has one before it
            layer.index
            for layer in reversed(self.layers)
            if layer.attention is not None
            and layer.attention.producer is None
            and types[layer.index] == types[index]
        )

    def _list_linears(
        self, attention: Attention | None, path: str, block: nn.Module
    ) -> Iterator[Linear]:
        """Describe every linear of a layer; note the weights that cannot be observed."""
        for name, module in block.named_modules():
            full = f"{path}.{name}"
            if is_experts(module):
                yield from _list_experts(path, name, module)
            elif is_linear(module):
                in_features, out_features = _linear_features(module)
                section, root, shard, parts = self._classify(attention, path, name, out_features)
                yield Linear(
                    module=full,
                    section=section,
                    root=root,
                    in_features=in_features,
                    out_features=out_features,
                    shard=shard,
                    parts=parts,
                    weight_name=f"{full}.weight",
                    checkpoint_name=self._names.get(f"{full}.weight"),
                )
            elif not isinstance(module, nn.Embedding) and (
                not type(module).__module__.startswith("torch.nn")
            ):
                # stacked experts have 3 dimensions, or 2 with all rows; a router has fewer rows
                heavy = [
                    leaf
                    for leaf, own in module.named_parameters(recurse=False)
                    if is_matrix(own)
                    and (own.dim() >= 3 or min(own.shape) >= self.config.hidden_size)
                ]
                if heavy:
                    self.unobserved[full] = (
                        f"{type(module).__name__} multiplies by {', '.join(heavy)} itself, and "
                        "uses neither a linear module nor transformers' experts interface"
                    )

    def _classify(
        self, attention: Attention | None, path: str, name: str, out_features: int
    ) -> tuple[Section, str, Shard, tuple[Part, ...]]:
        """Give a linear's section, the path that its keys are relative to, its shard and parts."""
        suffix = name.rpartition(".")[2]
        rows = (Part(name=suffix, count=out_features, unit=1, per_group=out_features),)
        if attention is not None and f"{path}.{name}".startswith(f"{attention.module}."):
            root = attention.module
            if suffix in FUSED_QKV and suffix not in ATTENTION_SHARDS:
                heads = attention.num_heads, attention.num_kv_heads, attention.k_head_dim
                if not (parts := qkv_parts(self.config, *heads)):
                    raise ModelError(
                        f"{self.config.model_type}: the order of q, k and v rows inside "
                        f"{root}.{suffix} is not known (looked for the family in "
                        "fp8calib.model.layouts)"
                    )
                return "attention", root, "column", parts
            if suffix not in ATTENTION_SHARDS:
                return "other", root, "replicated", rows
            shard = ATTENTION_SHARDS[suffix]
            if shard == "column":
                is_kv = suffix in {"k_proj", "v_proj"}
                count = attention.num_kv_heads if is_kv else attention.num_heads
                size = out_features // count
                rows = (Part(name=suffix, count=count, unit=size, per_group=count),)
            return "attention", root, shard, rows
        head, _, rest = name.partition(".")
        if suffix in MLP_SHARDS and "attn" not in head and "attention" not in head:
            parts = gate_up_parts(out_features) if suffix in FUSED_GATE_UP else rows
            return "mlp", f"{path}.{head}" if rest else path, MLP_SHARDS[suffix], parts
        return "other", path, "replicated", rows


def _linear_features(module: nn.Module) -> tuple[int, int]:
    """Give (in, out) features; a Conv1D's weight is stored [in, out]."""
    weight: Any = module.weight
    rows, columns = weight.shape
    return (rows, columns) if is_transposed(module) else (columns, rows)


def _find_kv_heads(config: Any, module: nn.Module, num_heads: int) -> tuple[int, int, int]:
    """Find the number of KV heads, and the sizes of a head of K and of V."""
    sizes = {
        name: _linear_features(linear)
        for name, linear in module.named_children()
        if is_linear(linear)
    }
    stated = (getattr(owner, "head_dim", None) for owner in (module, config))
    head_dim = next((value for value in stated if isinstance(value, int)), None)
    if head_dim is None:
        output = next((sizes[name][0] for name in _OUTPUTS if name in sizes), None)
        head_dim = (int(config.hidden_size) if output is None else output) // num_heads
    fused = next((name for name in FUSED_QKV if name in sizes), None)
    num_kv_heads, v_head_dim = 0, head_dim
    if fused is not None:
        num_kv_heads = (sizes[fused][1] // head_dim - num_heads) // 2
    elif "k_proj" in sizes:
        num_kv_heads = sizes["k_proj"][1] // head_dim
        v_head_dim = sizes.get("v_proj", sizes["k_proj"])[1] // max(num_kv_heads, 1)
    if num_kv_heads < 1:
        raise ModelError(
            f"{type(module).__name__}: no K projection found (looked for k_proj or one of "
            f"{', '.join(FUSED_QKV)} with heads of {head_dim}; it holds "
            f"{', '.join(sizes) or 'no linear'})"
        )
    return num_kv_heads, head_dim, v_head_dim


def _list_experts(path: str, name: str, module: nn.Module) -> Iterator[Linear]:
    """Describe the projections of all experts of a layer."""
    owner: Any = module
    head, _, rest = name.partition(".")
    num_experts, rows, columns = owner.down_proj.shape
    hidden, intermediate = (columns, rows) if owner.is_transposed else (rows, columns)
    # Channels share a stored amax by blocks: at most 256, of these numbers that which most
    # tensor-parallel degrees divide, and of several such the largest.
    counts = [n for n in range(1, min(intermediate, _MOST_BLOCKS) + 1) if intermediate % n == 0]
    blocks = max(counts, key=lambda n: (sum(n % tp == 0 for tp in range(1, n + 1)), n))
    fused = "gate_up_proj" if owner.has_gate else "up_proj"
    names = ("gate_proj", "up_proj", "down_proj") if owner.has_gate else ("up_proj", "down_proj")
    for suffix in names:
        is_down = suffix == "down_proj"
        out_features = hidden if is_down else intermediate
        yield Linear(
            module=f"{path}.{name}.{suffix}",
            section="mlp",
            root=f"{path}.{head}" if rest else path,
            in_features=intermediate if is_down else hidden,
            out_features=out_features,
            shard="row" if is_down else "column",
            parts=(Part(name=suffix, count=out_features, unit=1, per_group=out_features),),
            num_experts=int(num_experts),
            expert_block=intermediate // blocks,
            weight_name=f"{path}.{name}.{'down_proj' if is_down else fused}",
        )
