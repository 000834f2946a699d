"""The geometry of common dense models, from config.json and names alone.

Importing transformers and building its class takes ten times as long as all else that `check` does.
Here are the classes that most checkpoints have, a row each. Whatever a row does not settle (another
key, a null, an odd value, another name of a tensor) is left to transformers
(`fp8calib.model.geometry_from_config`, `fp8calib.model.config_faults`), with which a test compares
drawn configs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fp8calib.checkpoint.checkpoint import open_leniently, stored_dtype
from fp8calib.checkpoint.model_config import MAX_LAYERS, QUANTIZATION_KEYS, find_dtype
from fp8calib.model.plain_sections import has_plain_sections
from fp8calib.model.shapes import Attention, Layer, Linear, ModelGeometry, Part

_DTYPES = ("bfloat16", "float16", "float32")
_LLAMA_NORMS = ("input_layernorm", "post_attention_layernorm")
_GEMMA_NORMS = (*_LLAMA_NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm")
_WINDOW, _FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A class of transformers, by the config's model type."""

    name: str
    """The prefix of its classes."""
    norms: tuple[str, ...] = _LLAMA_NORMS
    biased: tuple[str, ...] = ()
    """Projections that have a bias whatever the config says."""
    head_norm: str = ""
    """`head`: q and k have a norm of one head each; `all`: of all heads."""
    head_dim: int | None = None
    """Without `head_dim` in the config; None for the hidden size by the heads."""
    pads: bool = False
    """Whether it has a padding token of its own, which a null switches off."""
    is_tied: bool = False
    """Without `tie_word_embeddings` in the config."""
    window_period: int = 0
    """Every layer has a window but each of this period, without `layer_types`; 0 for no types."""
    keys: tuple[str, ...] = ()
    """Keys of its own, see `_KINDS`."""


FAMILIES = {
    "llama": _Family(name="Llama", keys=("attention_bias", "mlp_bias", "pretraining_tp")),
    "mistral": _Family(name="Mistral", keys=("sliding_window",)),
    "qwen2": _Family(
        name="Qwen2",
        biased=("q_proj", "k_proj", "v_proj"),
        keys=("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
    ),
    "qwen3": _Family(
        name="Qwen3",
        head_norm="head",
        head_dim=128,
        keys=(
            *("use_sliding_window", "sliding_window", "max_window_layers", "layer_types"),
            "attention_bias",
        ),
    ),
    "gemma2": _Family(
        name="Gemma2",
        norms=_GEMMA_NORMS,
        head_dim=256,
        pads=True,
        is_tied=True,
        window_period=2,
        keys=(
            *("attention_bias", "sliding_window", "layer_types", "hidden_activation"),
            *("query_pre_attn_scalar", "attn_logit_softcapping", "final_logit_softcapping"),
        ),
    ),
    "granite": _Family(
        name="Granite",
        keys=(
            *("attention_bias", "mlp_bias", "embedding_multiplier", "logits_scaling"),
            *("residual_multiplier", "attention_multiplier"),
        ),
    ),
    "olmo2": _Family(
        name="Olmo2",
        norms=("post_attention_layernorm", "post_feedforward_layernorm"),
        head_norm="all",
        pads=True,
        keys=("attention_bias",),
    ),
}
_REQUIRED = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "vocab_size", "max_position_embeddings"),
)
_KINDS = {
    **dict.fromkeys(_REQUIRED, "size"),
    **dict.fromkeys(("head_dim", "pretraining_tp", "query_pre_attn_scalar"), "size"),
    "max_window_layers": "size",
    "sliding_window": "window",
    **dict.fromkeys(("attention_bias", "mlp_bias", "use_cache", "tie_word_embeddings"), "switch"),
    "use_sliding_window": "off",
    **dict.fromkeys(("hidden_act", "hidden_activation"), "activation"),
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), "small"),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), "float"),
    **dict.fromkeys(("embedding_multiplier", "logits_scaling", "rope_theta"), "number"),
    **dict.fromkeys(("residual_multiplier", "attention_multiplier"), "number"),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "unk_token_id"), "token"),
    "pad_token_id": "padding",
    "attention_dropout": "dropout",
    **dict.fromkeys(("dtype", "torch_dtype"), "dtype"),
    **dict.fromkeys(("transformers_version", "_name_or_path", "_model_name_or_path"), "text"),
}
_COMMON = frozenset(
    (
        *_REQUIRED,
        *("head_dim", "use_cache", "tie_word_embeddings", "hidden_act", "rms_norm_eps"),
        *("initializer_range", "rope_theta", "attention_dropout", "dtype", "torch_dtype"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id"),
        *("transformers_version", "_name_or_path", "_model_name_or_path"),
    )
)
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_PROJECTION = r"(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
_SCALE = re.compile(
    rf"model\.layers\.(\d+)\.(?:{_PROJECTION}\.(?:weight_scale|weight_scale_inv|input_scale)"
    r"|self_attn\.[qkv]_(?:scale|zero_point)|self_attn\.[kv]_proj\.[kv]_scale)"
)
"""Tensors that fill no parameter, and that transformers renames into none."""


def is_plain(folder: Path, config: Mapping[str, object]) -> bool:
    """Tell whether transformers and compressed-tensors accept a folder's configs, without doubts.

    False says nothing: they have to be asked.
    """
    return _find_family(config) is not None and has_plain_sections(folder, config)


def read_plain_geometry(folder: Path, config: Mapping[str, object]) -> ModelGeometry | None:
    """Give what `read_geometry` finds; None where it has to be asked."""
    family = _find_family(config)
    if family is None:
        return None
    checkpoint = open_leniently(folder)
    shapes = dict(_list_parameters(family, config))
    leftovers = [name for name in checkpoint.tensors if name not in shapes]
    scales = [_SCALE.fullmatch(name) for name in leftovers]
    layers = int(str(config["num_hidden_layers"]))
    if not all(found is not None and int(found[1]) < layers for found in scales):
        return None
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = {}
    if config.get("tie_word_embeddings", family.is_tied):
        if embedding not in checkpoint:
            return None
        tied = {head: embedding}
        if head not in checkpoint:
            del shapes[head]
    dtype = find_dtype(config) or stored_dtype(checkpoint)
    return ModelGeometry(
        architecture=f"{family.name}ForCausalLM",
        model_type=str(config["model_type"]),
        checkpoint_dtype=dtype if dtype in _DTYPES else "bfloat16",
        layers=tuple(_make_layer(family, config, index) for index in range(layers)),
        matrices={
            name: (shape[0], shape[1])
            for name, shape in shapes.items()
            if len(shape) == 2 and name != embedding
        },
        tied=tied,
        parameters=shapes,
        leftovers=tuple(sorted(leftovers, key=_split_numbers)),
    )


def _split_numbers(name: str) -> list[tuple[int, int, str]]:
    """Sort as transformers does: layer 2 before layer 10, numbers before words."""
    parts = name.split(".")
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]


def _find_family(config: Mapping[str, object]) -> _Family | None:
    """Find the row of a config of which every key is understood."""
    plain = {key: value for key, value in config.items() if key not in QUANTIZATION_KEYS}
    family = FAMILIES.get(str(plain.pop("model_type", None)))
    if family is None or plain.pop("architectures", None) != [f"{family.name}ForCausalLM"]:
        return None
    ropes = plain.pop("rope_scaling", None), plain.pop("rope_parameters", None)
    known = {key for key in plain if key in _COMMON or key in family.keys}
    if known != plain.keys() or not all(key in plain for key in _REQUIRED):
        return None
    if not all(_is_usual(_KINDS[key], plain[key]) for key in plain if key != "layer_types"):
        return None
    values: Any = plain
    heads, head_dim = values["num_attention_heads"], _head_dim(family, values)
    fits = (
        not any(isinstance(values.get(f"{key}_token_id"), list) for key in ("bos", "unk"))
        and (not family.pads or values.get("pad_token_id", 0) is not None)
        and (values.get("pad_token_id") or 0) < values["vocab_size"]
        and values["num_hidden_layers"] <= MAX_LAYERS
        and values["hidden_size"] % heads == heads % values["num_key_value_heads"] == 0
        and head_dim % 2 == 0
        and (not family.window_period or values.get("sliding_window") is not None)
        and _has_usual_types(family, values)
        and _has_usual_rope(values, *ropes)
    )
    return family if fits else None


def _is_usual(kind: str, value: object) -> bool:
    """Tell whether transformers accepts a value, and engines have no reason not to."""
    if isinstance(value, list):
        return kind == "token" and bool(value) and all(_is_usual(kind, each) for each in value)
    if kind in ("token", "padding", "size", "window") and value is not None:
        return type(value) is int and (0 if kind in ("token", "padding") else 1) <= value < 1 << 31
    if isinstance(value, str):
        texts = {"activation": ("silu", "gelu", "gelu_pytorch_tanh", "relu"), "dtype": _DTYPES}
        return kind == "text" or value in texts.get(kind, ())
    if isinstance(value, bool):
        return kind == "switch" or (kind == "off" and not value)
    if kind in ("number", "dropout") and isinstance(value, int | float):
        return 0 < value < 1e12 if kind == "number" else 0 <= value < 1
    is_float = isinstance(value, float) and 0 < value < (1 if kind == "small" else 1e12)
    return (kind in ("small", "float") and is_float) or (
        kind in ("padding", "window") and value is None
    )


def _has_usual_types(family: _Family, config: Mapping[str, Any]) -> bool:
    types = config.get("layer_types")
    if types is None:
        return "layer_types" not in config
    usual = {_FULL, _WINDOW} if family.window_period else {_FULL}
    is_list = isinstance(types, list) and len(types) == config["num_hidden_layers"]
    return is_list and all(isinstance(each, str) and each in usual for each in types)


def _has_usual_rope(config: Mapping[str, Any], scaling: object, parameters: object) -> bool:
    """Accept plain angles, and those of Llama 3, in the keys of transformers 4 or of 5."""
    if scaling is not None and parameters is not None:
        return False
    if scaling is None and parameters is None:
        return True
    given = {**parameters} if isinstance(parameters, dict) else {}
    if isinstance(scaling, dict):
        given = {**scaling, "rope_theta": config.get("rope_theta")}
    elif "rope_theta" in config:
        return False
    kind = given.pop("rope_type", None)
    wanted: tuple[str, ...] = ("rope_theta",)
    if kind == "llama3":
        wanted = ("rope_theta", *_LLAMA3)
    elif kind != "default" or scaling is not None:
        return False
    if given.keys() != set(wanted) or not all(_is_usual("number", each) for each in given.values()):
        return False
    original = given.get("original_max_position_embeddings", 1)
    return type(original) is int


def _head_dim(family: _Family, config: Mapping[str, Any]) -> int:
    default = family.head_dim or config["hidden_size"] // config["num_attention_heads"]
    return int(config.get("head_dim", default))


def _list_projections(
    family: _Family, config: Mapping[str, Any]
) -> Iterator[tuple[str, int, int, int]]:
    """List the linears of a layer: path, outputs, inputs and heads (0 where it has none)."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = _head_dim(family, config)
    yield "self_attn.q_proj", heads * head_dim, hidden, heads
    yield "self_attn.k_proj", kv_heads * head_dim, hidden, kv_heads
    yield "self_attn.v_proj", kv_heads * head_dim, hidden, kv_heads
    yield "self_attn.o_proj", hidden, heads * head_dim, 0
    yield "mlp.gate_proj", inner, hidden, 0
    yield "mlp.up_proj", inner, hidden, 0
    yield "mlp.down_proj", hidden, inner, 0


def _list_parameters(
    family: _Family, config: Mapping[str, Any]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """List every parameter of the class, with its shape."""
    hidden = config["hidden_size"]
    projections = list(_list_projections(family, config))
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        for path, rows, columns, _ in projections:
            if path == "mlp.gate_proj" and family.head_norm:
                yield from _list_head_norms(family, config, layer)
            yield f"{layer}.{path}.weight", (rows, columns)
            switch = "mlp_bias" if path.startswith("mlp") else "attention_bias"
            if config.get(switch, False) or path.removeprefix("self_attn.") in family.biased:
                yield f"{layer}.{path}.bias", (rows,)
        for norm in family.norms:
            yield f"{layer}.{norm}.weight", (hidden,)
    yield "model.norm.weight", (hidden,)
    yield "lm_head.weight", (config["vocab_size"], hidden)


def _list_head_norms(
    family: _Family, config: Mapping[str, Any], layer: str
) -> Iterator[tuple[str, tuple[int]]]:
    for name, key in (("q_norm", "num_attention_heads"), ("k_norm", "num_key_value_heads")):
        heads = config[key] if family.head_norm == "all" else 1
        yield f"{layer}.self_attn.{name}.weight", (heads * _head_dim(family, config),)


def _make_layer(family: _Family, config: Mapping[str, Any], index: int) -> Layer:
    module, attention = f"model.layers.{index}", f"model.layers.{index}.self_attn"
    window = config.get("sliding_window")
    if family.name == "Mistral":
        window = config.get("sliding_window", 4096)
    elif not family.window_period or _layer_type(family, config, index) != _WINDOW:
        window = None
    return Layer(
        index=index,
        module=module,
        mixer=f"{family.name}Attention",
        attention=Attention(
            module=attention,
            checkpoint_module=attention,
            kind="heads",
            num_heads=config["num_attention_heads"],
            num_kv_heads=config["num_key_value_heads"],
            k_head_dim=_head_dim(family, config),
            v_head_dim=_head_dim(family, config),
            sliding_window=window,
        ),
        linears=tuple(
            _make_linear(module, path, rows, columns, heads)
            for path, rows, columns, heads in _list_projections(family, config)
        ),
    )


def _layer_type(family: _Family, config: Mapping[str, Any], index: int) -> str:
    types = config.get("layer_types")
    return (
        str(types[index]) if types else (_WINDOW if (index + 1) % family.window_period else _FULL)
    )


def _make_linear(layer: str, path: str, rows: int, columns: int, heads: int) -> Linear:
    section, _, name = path.rpartition(".")
    count = heads or rows
    return Linear(
        module=f"{layer}.{path}",
        section="mlp" if section == "mlp" else "attention",
        root=f"{layer}.{section}",
        in_features=columns,
        out_features=rows,
        shard="row" if name in ("o_proj", "down_proj") else "column",
        parts=(Part(name=name, count=count, unit=rows // count, per_group=count),),
        weight_name=f"{layer}.{path}.weight",
        checkpoint_name=f"{layer}.{path}.weight",
    )
