"""A model's geometry from config.json and tensor names, of common models without transformers.

Importing transformers and building its class takes ten times as long as all else that `check` does.
Here are the classes that most checkpoints have, a row each, and types of the settings that the
libraries certainly accept. Whatever does not fit (another key, a null, an odd value, another name
of a tensor) is left to transformers (`fp8calib.model.geometry_from_class`,
`fp8calib.model.config_faults`), with which a test compares drawn configs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, NotRequired, get_args

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from typing_extensions import TypedDict

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


def _object(required: Mapping[str, Any], optional: Mapping[str, Any] = MappingProxyType({})) -> Any:
    """Make the type of an object that has the required keys, and may have the optional ones."""
    fields = {**{key: NotRequired[kind] for key, kind in optional.items()}, **required}
    made: Any = TypedDict("made", fields)  # type: ignore[misc]
    setattr(made, "__pydantic_config__", _STRICT)  # noqa: B010 -- mypy knows no such attribute
    return made


def _fits(value: object, kind: Any) -> bool:
    """Tell whether a value of a JSON file is of a type."""
    try:
        _adapt(kind).validate_python(value, strict=True)
    except ValidationError:
        return False
    return True


_STRICT = ConfigDict(strict=True, extra="forbid")
_adapt = cache(TypeAdapter)
_SIZE: Any = Annotated[int, Field(ge=1, lt=1 << 31)]
_TOKEN: Any = Annotated[int, Field(ge=0, lt=1 << 31)]
_TOKENS: Any = _TOKEN | Annotated[list[_TOKEN], Field(min_length=1)]
_SMALL: Any = Annotated[float, Field(ge=1e-12, le=0.999)]
_POSITIVE: Any = Annotated[float, Field(ge=1e-12, le=1e12)]
_ACTIVATION = Literal["silu", "gelu", "gelu_pytorch_tanh", "relu"]
_DTYPES = Literal["bfloat16", "float16", "float32"]

# --- models --------------------------------------------------------------------------------------

_LLAMA3 = {
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    "original_max_position_embeddings": _SIZE,
    "rope_type": Literal["llama3"],
}
_REQUIRED = {
    **dict.fromkeys(("hidden_size", "intermediate_size", "num_attention_heads"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "vocab_size", "max_position_embeddings"), _SIZE),
    "num_hidden_layers": Annotated[int, Field(ge=1, le=MAX_LAYERS)],
}
_COMMON = {
    "head_dim": _SIZE,
    **dict.fromkeys(("use_cache", "tie_word_embeddings"), bool),
    "hidden_act": _ACTIVATION,
    **dict.fromkeys(("rms_norm_eps", "initializer_range"), _SMALL),
    "attention_dropout": Annotated[float, Field(ge=0, le=0.999)],
    **dict.fromkeys(("dtype", "torch_dtype"), _DTYPES),
    **dict.fromkeys(("bos_token_id", "unk_token_id"), _TOKEN),
    "eos_token_id": _TOKENS,
    "pad_token_id": _TOKEN | None,
    **dict.fromkeys(("transformers_version", "_name_or_path", "_model_name_or_path"), str),
    "rope_theta": _POSITIVE,
    "rope_scaling": _object(_LLAMA3) | None,
    "rope_parameters": _object({"rope_type": Literal["default"], "rope_theta": _POSITIVE})
    | _object({**_LLAMA3, "rope_theta": _POSITIVE})
    | None,
}
_WINDOW = _SIZE | None
_WINDOWS_OFF = {
    "use_sliding_window": Literal[False],
    "sliding_window": _WINDOW,
    "max_window_layers": _SIZE,
    "layer_types": list[Literal["full_attention"]],
}


@dataclass(frozen=True, kw_only=True)
class _Family:
    """A class of transformers, by the config's model type."""

    name: str
    """The prefix of its classes."""
    keys: Mapping[str, Any]
    """The types of its own keys."""
    biased: tuple[str, ...] = ()
    """Projections that have a bias whatever the config says."""
    has_head_norms: bool = False
    """Whether q and k have a norm of one head each."""
    head_dim: int | None = None
    """Without `head_dim` in the config; None for the hidden size by the heads."""
    window: int | None = None
    """The window of every layer without `sliding_window` in the config."""

    @cached_property
    def config(self) -> Any:
        """The type of its config.json."""
        names = {"model_type": str, "architectures": list[str]}
        return _object({**_REQUIRED, **names}, {**_COMMON, **self.keys})


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
        checkpoint_dtype=dtype if dtype in get_args(_DTYPES) else "bfloat16",
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
    plain = {k: v for k, v in config.items() if k not in QUANTIZATION_KEYS}
    if not _fits(plain, family.config):
        return None
    heads, num_layers = config["num_attention_heads"], config["num_hidden_layers"]
    head_dim: int = config.get("head_dim", family.head_dim or config["hidden_size"] // heads)
    has_theta = "rope_theta" in config
    has_scaling, has_parameters = (
        config.get(key) is not None for key in ("rope_scaling", "rope_parameters")
    )
    fits = (
        config["architectures"] == [f"{family.name}ForCausalLM"]
        and (config.get("pad_token_id") or 0) < config["vocab_size"]
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

_FORMATS = Literal["float-quantized", "naive-quantized", "dense"]
_GENERATION = _object(
    {},
    {
        **dict.fromkeys(("_from_model_config", "do_sample", "use_cache"), bool),
        **dict.fromkeys(("output_attentions", "output_hidden_states"), Literal[False]),
        **dict.fromkeys(("bos_token_id", "pad_token_id"), _TOKEN),
        "eos_token_id": _TOKENS,
        **dict.fromkeys(("top_k", "max_length", "max_new_tokens"), _SIZE),
        "temperature": Annotated[float, Field(ge=1e-3, le=2)],
        "top_p": Annotated[float, Field(ge=1e-3, le=1)],
        "repetition_penalty": Annotated[float, Field(ge=1e-3, le=10)],
        "transformers_version": str,
    },
)
_OBSERVERS = Literal[None, "minmax", "static_minmax", "memoryless_minmax", "mse", "memoryless_mse"]
_EMPTY = _object({})
_ONE_VALUE: Mapping[str, Any] = {
    "symmetric": Literal[True],
    "observer_kwargs": _EMPTY,
    **dict.fromkeys(("actorder", "scale_dtype", "zp_dtype", "group_size", "block_structure"), None),
}


def _scheme(strategy: str, *, is_dynamic: bool = False, **sizes: Any) -> Any:
    """Make the type of a scheme of FP8."""
    constants = {"num_bits": 8, "type": "float", "strategy": strategy}
    required = {**{key: Literal[value] for key, value in constants.items()}, **sizes}
    if is_dynamic:
        return _object({**required, "dynamic": Literal[True]}, {**_ONE_VALUE, "observer": None})
    optional = {**_ONE_VALUE, "dynamic": Literal[False], "observer": _OBSERVERS}
    return _object(required, optional)


_BLOCK = Annotated[list[Literal[128]], Field(min_length=2, max_length=2)]
_TENSOR = _scheme("tensor")
_GROUP = _object(
    {
        "targets": Annotated[list[str], Field(min_length=1)],
        "weights": _TENSOR | _scheme("channel") | _scheme("block", block_structure=_BLOCK),
    },
    {
        "input_activations": _TENSOR
        | _scheme("token", is_dynamic=True)
        | _scheme("group", is_dynamic=True, group_size=Literal[128])
        | None,
        "output_activations": None,
        "format": _FORMATS,
    },
)
_SECTION = _object(
    {
        "quant_method": Literal["compressed-tensors"],
        "format": _FORMATS,
        "quantization_status": Literal["compressed"],
        "config_groups": dict[str, _GROUP],  # type: ignore[valid-type]
    },
    {
        "kv_cache_scheme": _TENSOR | None,
        "ignore": list[str],
        "version": str,
        "global_compression_ratio": None,
        "sparsity_config": _EMPTY,
        "transform_config": _EMPTY,
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
    if method == "compressed-tensors" and not _fits(section, _SECTION):
        return False
    path = folder / GENERATION_NAME
    try:
        return not path.is_file() or _fits(load_json_object(path), _GENERATION)
    except ModelError:
        return False
