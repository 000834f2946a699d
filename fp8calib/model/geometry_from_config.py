"""A model's geometry from config.json and tensor names, of common models without transformers.

Importing transformers and building its class takes ten times as long as all else that `check` does.
Here are the classes that most checkpoints have, a row each, and patterns of the settings that the
libraries certainly accept. Whatever does not fit (another key, a null, an odd value, another name
of a tensor) is left to transformers (`fp8calib.model.geometry_from_class`,
`fp8calib.model.config_faults`), with which a test compares drawn configs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from fp8calib.checkpoint.checkpoint import Checkpoint, open_leniently, stored_dtype
from fp8calib.checkpoint.header import INTEGERS
from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import (
    MAX_LAYERS,
    QUANTIZATION_KEYS,
    find_dtype,
    find_quantization_configs,
)
from fp8calib.errors import ModelError
from fp8calib.model.geometry import Attention, Layer, Linear, ModelGeometry, Part

GENERATION_NAME = "generation_config.json"


_Fits = Callable[[Any], bool]
"""Tells whether a value of a JSON file is as expected."""


def _fits(value: object, pattern: object) -> bool:
    """Tell whether a value of a JSON file is as a pattern says.

    A tuple has alternatives, a type stands for all its values, a function tells itself, and
    everything else stands for itself.
    """
    if isinstance(pattern, tuple):
        return any(_fits(value, each) for each in pattern)
    if isinstance(pattern, type):
        return type(value) is pattern
    if callable(pattern):
        return bool(pattern(value))
    return type(value) is type(pattern) and value == pattern


def _number(kinds: tuple[type, ...], least: float, most: float) -> _Fits:
    """Expect a number in a closed range; True is none."""
    return lambda value: type(value) in kinds and least <= value <= most


def _list(pattern: object, least: int = 0) -> _Fits:
    """Expect a list of items that all fit."""
    return lambda value: (
        isinstance(value, list)
        and len(value) >= least
        and all(_fits(item, pattern) for item in value)
    )


def _object(
    required: Mapping[str, object], optional: Mapping[str, object] = MappingProxyType({})
) -> _Fits:
    """Expect an object that has the required keys, and no others than these and the optional."""
    known = {**optional, **required}
    return lambda value: (
        isinstance(value, dict)
        and required.keys() <= value.keys() <= known.keys()
        and all(_fits(item, known[key]) for key, item in value.items())
    )


_SIZE = _number((int,), 1, (1 << 31) - 1)
_TOKEN = _number((int,), 0, (1 << 31) - 1)
_TOKENS = (_TOKEN, _list(_TOKEN, least=1))
_SMALL = _number((float,), 1e-12, 0.999)
_POSITIVE = _number((int, float), 1e-12, 1e12)
_ACTIVATION = ("silu", "gelu", "gelu_pytorch_tanh", "relu")
_DTYPES = ("bfloat16", "float16", "float32")

# --- models --------------------------------------------------------------------------------------

_LLAMA3 = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    "original_max_position_embeddings": _SIZE,
    "rope_type": "llama3",
}
_REQUIRED = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "vocab_size", "max_position_embeddings"), _SIZE),
    "num_hidden_layers": _number((int,), 1, MAX_LAYERS),
}
_COMMON = {
    "head_dim": _SIZE,
    **dict.fromkeys(("use_cache", "tie_word_embeddings"), bool),
    "hidden_act": _ACTIVATION,
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), _SMALL),
    "attention_dropout": _number((int, float), 0, 0.999),
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPES),
    **dict.fromkeys(("bos_token_id", "unk_token_id"), _TOKEN),
    "eos_token_id": _TOKENS,
    "pad_token_id": (_TOKEN, None),
    **dict.fromkeys(("transformers_version", "_name_or_path", "_model_name_or_path"), str),
    "rope_theta": _POSITIVE,
    "rope_scaling": (None, _object(_LLAMA3)),
    "rope_parameters": (
        None,
        _object({"rope_type": "default", "rope_theta": _POSITIVE}),
        _object({**_LLAMA3, "rope_theta": _POSITIVE}),
    ),
}
_WINDOW = (_SIZE, None)
_WINDOWS_OFF = {
    "use_sliding_window": False,
    "sliding_window": _WINDOW,
    "max_window_layers": _SIZE,
    "layer_types": _list("full_attention"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    """A class of transformers, by the config's model type."""

    name: str
    """The prefix of its classes."""
    keys: Mapping[str, object]
    """Patterns of its own keys."""
    biased: tuple[str, ...] = ()
    """Projections that have a bias whatever the config says."""
    has_head_norms: bool = False
    """Whether q and k have a norm of one head each."""
    head_dim: int | None = None
    """Without `head_dim` in the config; None for the hidden size by the heads."""
    window: int | None = None
    """The window of every layer without `sliding_window` in the config."""


FAMILIES = {
    "llama": _Family(
        name="Llama", keys={"attention_bias": bool, "mlp_bias": bool, "pretraining_tp": _SIZE}
    ),
    "mistral": _Family(name="Mistral", keys={"sliding_window": _WINDOW}, window=4096),
    "qwen2": _Family(name="Qwen2", keys=_WINDOWS_OFF, biased=("q_proj", "k_proj", "v_proj")),
    "qwen3": _Family(
        name="Qwen3",
        keys={**_WINDOWS_OFF, "attention_bias": bool},
        has_head_norms=True,
        head_dim=128,
    ),
}
_PROJECTION = r"(?:self_attn\.[qkvo]_proj|mlp\.(?:gate|up|down)_proj)"
_SCALE = re.compile(
    rf"model\.layers\.(\d+)\.(?:{_PROJECTION}\.(?:weight_scale|weight_scale_inv|input_scale)"
    r"|self_attn\.[qkv]_(?:scale|zero_point)|self_attn\.[kv]_proj\.[kv]_scale)"
)
"""Tensors that fill no parameter, and that transformers renames into none."""


def read_geometry(folder: Path, config: Mapping[str, Any]) -> ModelGeometry:
    """Find the geometry of the model that a config describes, from names and without weights.

    The checkpoint may be quantized or damaged.

    Raises:
        UnusableConfigError: transformers cannot build a model from the config.
        NotUnderstoodError: its layers are not understood, or only its own code knows them.
        ModelError: its type is unknown, or the model is not decoder-only.
    """
    if (found := read_plain_geometry(folder, config)) is not None:
        return found
    from fp8calib.model.geometry_from_class import build_geometry  # noqa: PLC0415 -- transformers

    return build_geometry(folder, config)


def read_plain_geometry(folder: Path, config: Mapping[str, Any]) -> ModelGeometry | None:
    """Give what `build_geometry` finds; None if it has to be asked."""
    found = _find_family(config)
    if found is None:
        return None
    checkpoint, (family, head_dim) = open_leniently(folder), found
    layers, shapes = _build(family, head_dim, config)
    leftovers = [name for name in checkpoint.tensors if name not in shapes]
    scales = [_SCALE.fullmatch(name) for name in leftovers]
    if not all(found is not None and int(found[1]) < len(layers) for found in scales):
        return None
    embedding, head = "model.embed_tokens.weight", "lm_head.weight"
    tied = {}
    if config.get("tie_word_embeddings", False):
        if embedding not in checkpoint.tensors:
            return None
        tied = {head: embedding}
        if head not in checkpoint.tensors:
            del shapes[head]
    dtype = find_dtype(config) or stored_dtype(checkpoint)
    return ModelGeometry(
        architecture=f"{family.name}ForCausalLM",
        model_type=config["model_type"],
        checkpoint_dtype=dtype if dtype in _DTYPES else "bfloat16",
        layers=tuple(layers),
        matrices={
            name: (shape[0], shape[1])
            for name, shape in shapes.items()
            if len(shape) == 2 and name != embedding
        },
        tied=tied,
        parameters=shapes,
        # as transformers sorts them: layer 2 before layer 10, numbers before words
        leftovers=tuple(
            sorted(
                leftovers,
                key=lambda name: [
                    (0, int(part), "") if part.isdigit() else (1, 0, part)
                    for part in name.split(".")
                ],
            )
        ),
    )


def read_whole_geometry(checkpoint: Checkpoint, config: Mapping[str, Any]) -> ModelGeometry | None:
    """Give the geometry of a common model whose checkpoint holds each parameter and nothing else.

    None if transformers has to say whether the checkpoint is complete.
    """
    found = read_plain_geometry(checkpoint.folder, config)
    if found is None or found.leftovers:
        return None
    stored = {
        name: tuple(entry.shape)
        for name, entry in checkpoint.tensors.items()
        if entry.dtype not in INTEGERS
    }
    if stored != found.parameters:
        return None
    return found.model_copy(update={"checkpoint_dtype": stored_dtype(checkpoint)})


def _find_family(config: Mapping[str, Any]) -> tuple[_Family, int] | None:
    """Find a config's family and the size of its heads; None unless every key is understood."""
    family = FAMILIES.get(str(config.get("model_type")))
    if family is None:
        return None
    names = {"model_type": str, "architectures": [f"{family.name}ForCausalLM"]}
    pattern = _object({**_REQUIRED, **names}, {**_COMMON, **family.keys})
    if not pattern({k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}):
        return None
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim: int = config.get("head_dim", family.head_dim or config["hidden_size"] // heads)
    has_theta = "rope_theta" in config
    has_scaling, has_parameters = (
        config.get(key) is not None for key in ("rope_scaling", "rope_parameters")
    )
    fits = (
        (config.get("pad_token_id") or 0) < config["vocab_size"]
        and config["hidden_size"] % heads == heads % config["num_key_value_heads"] == 0
        and head_dim % 2 == 0
        and len(config.get("layer_types", range(num_layers))) == num_layers
        # the base of the angles is beside `rope_scaling`, or in `rope_parameters`
        and not (has_parameters and (has_scaling or has_theta))
        and not (has_scaling and not has_theta)
    )
    return (family, head_dim) if fits else None


def _build(
    family: _Family, head_dim: int, config: Mapping[str, Any]
) -> tuple[list[Layer], dict[str, tuple[int, ...]]]:
    """Build the layers, and give the shape of every parameter of the class, in its order."""
    hidden, inner, vocab = (
        config[key] for key in ("hidden_size", "intermediate_size", "vocab_size")
    )
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    projections = (  # path, outputs, inputs, and heads or rows of the outputs
        ("self_attn.q_proj", heads * head_dim, hidden, heads),
        ("self_attn.k_proj", kv_heads * head_dim, hidden, kv_heads),
        ("self_attn.v_proj", kv_heads * head_dim, hidden, kv_heads),
        ("self_attn.o_proj", hidden, heads * head_dim, hidden),
        ("mlp.gate_proj", inner, hidden, inner),
        ("mlp.up_proj", inner, hidden, inner),
        ("mlp.down_proj", hidden, inner, hidden),
    )
    window = None
    if family.window is not None:
        window = config.get("sliding_window", family.window)
    layers: list[Layer] = []
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        linears = []
        for path, rows, columns, count in projections:
            section, _, name = path.partition(".")
            weight = f"{layer}.{path}.weight"
            if name == "gate_proj" and family.has_head_norms:
                for norm in ("q_norm", "k_norm"):
                    shapes[f"{layer}.self_attn.{norm}.weight"] = (head_dim,)
            shapes[weight] = (rows, columns)
            switch = "mlp_bias" if section == "mlp" else "attention_bias"
            if config.get(switch, False) or name in family.biased:
                shapes[f"{layer}.{path}.bias"] = (rows,)
            linears.append(
                Linear(
                    module=f"{layer}.{path}",
                    section="mlp" if section == "mlp" else "attention",
                    root=f"{layer}.{section}",
                    in_features=columns,
                    out_features=rows,
                    shard="row" if name in ("o_proj", "down_proj") else "column",
                    parts=(Part(name=name, count=count, unit=rows // count, per_group=count),),
                    weight_name=weight,
                    checkpoint_name=weight,
                )
            )
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}.{norm}.weight"] = (hidden,)
        attention = Attention(
            module=f"{layer}.self_attn",
            checkpoint_module=f"{layer}.self_attn",
            kind="heads",
            num_heads=heads,
            num_kv_heads=kv_heads,
            k_head_dim=head_dim,
            v_head_dim=head_dim,
            sliding_window=window,
        )
        mixer = f"{family.name}Attention"
        layers.append(
            Layer(
                index=index,
                module=layer,
                mixer=mixer,
                attention=attention,
                linears=tuple(linears),
            )
        )
    return layers, {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": (vocab, hidden)}


# --- sampling and quantization -------------------------------------------------------------------

_FORMATS = ("float-quantized", "naive-quantized", "dense")
_GENERATION = _object(
    {},
    {
        **dict.fromkeys(("_from_model_config", "do_sample", "use_cache"), bool),
        **dict.fromkeys(("output_attentions", "output_hidden_states"), False),
        **dict.fromkeys(("bos_token_id", "pad_token_id"), _TOKEN),
        "eos_token_id": _TOKENS,
        **dict.fromkeys(("top_k", "max_length", "max_new_tokens"), _SIZE),
        "temperature": _number((float,), 1e-3, 2),
        "top_p": _number((float,), 1e-3, 1),
        "repetition_penalty": _number((float,), 1e-3, 10),
        "transformers_version": str,
    },
)
_OBSERVERS = (None, "minmax", "static_minmax", "memoryless_minmax", "mse", "memoryless_mse")
_ONE_VALUE: Mapping[str, object] = {
    "symmetric": True,
    "observer_kwargs": {},
    **dict.fromkeys(("actorder", "scale_dtype", "zp_dtype", "group_size", "block_structure"), None),
}


def _scheme(strategy: str, *, is_dynamic: bool = False, **sizes: object) -> _Fits:
    """Make the pattern of a scheme of FP8."""
    required = {"num_bits": 8, "type": "float", "strategy": strategy, **sizes}
    if is_dynamic:
        return _object({**required, "dynamic": True}, {**_ONE_VALUE, "observer": None})
    return _object(required, {**_ONE_VALUE, "dynamic": False, "observer": _OBSERVERS})


_TENSOR = _scheme("tensor")
_GROUP = _object(
    {
        "targets": _list(str, least=1),
        "weights": (_TENSOR, _scheme("channel"), _scheme("block", block_structure=[128, 128])),
    },
    {
        "input_activations": (
            None,
            _TENSOR,
            _scheme("token", is_dynamic=True),
            _scheme("group", is_dynamic=True, group_size=128),
        ),
        "output_activations": None,
        "format": _FORMATS,
    },
)
_SECTION = _object(
    {
        "quant_method": "compressed-tensors",
        "format": _FORMATS,
        "quantization_status": "compressed",
        "config_groups": lambda groups: (
            isinstance(groups, dict) and all(_GROUP(each) for each in groups.values())
        ),
    },
    {
        "kv_cache_scheme": (None, _TENSOR),
        "ignore": _list(str),
        "version": str,
        "global_compression_ratio": None,
        "sparsity_config": {},
        "transform_config": {},
    },
)
"""What `quantize`, overlays and llm-compressor write for FP8."""


def is_plain(folder: Path, config: Mapping[str, object]) -> bool:
    """Tell whether transformers and compressed-tensors accept a folder's configs, without doubts.

    False says nothing: they have to be asked.
    """
    if _find_family(config) is None:
        return False
    section = next((section for _, section in find_quantization_configs(config)), {})
    method = str(section.get("quant_method")).replace("_", "-")
    if method == "compressed-tensors" and not _SECTION(section):
        return False
    path = folder / GENERATION_NAME
    try:
        return not path.is_file() or _GENERATION(load_json_object(path))
    except ModelError:
        return False
