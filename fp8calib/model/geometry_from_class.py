"""Find a model's geometry from transformers' class and tensor names, without its weights.

The checkpoint may be quantized or damaged: `check` still needs to know the layers of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn
from transformers import CONFIG_MAPPING

from fp8calib.checkpoint.checkpoint import open_leniently, stored_dtype
from fp8calib.checkpoint.model_config import (
    LAYER_COUNTS,
    MAX_LAYERS,
    find_dtype,
    let_layers_differ,
    without_quantization,
)
from fp8calib.errors import (
    Fp8CalibError,
    ModelError,
    NotUnderstoodError,
    UnusableConfigError,
    shorten,
)
from fp8calib.model.device import DTYPES
from fp8calib.model.expert_layouts import IN_OUT, OUT_IN, PARAMETERS, KnownStacks, cut_name
from fp8calib.model.geometry import ModelGeometry
from fp8calib.model.load import LoadedModel, ModelSource, build_skeleton
from fp8calib.model.prepared import compare_names, tied_names
from fp8calib.model.topology import find_geometry
from fp8calib.model.weight_source import WeightSource

_MAX_SIZE = 1 << 31
_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
"""Floats that JSON cannot express; transformers 5 writes them as {"__float__": NAME}."""


def build_geometry(folder: Path, config: Mapping[str, object]) -> ModelGeometry:
    """Find the geometry of the model that a config describes.

    Tensor names are read from the files of the folder; a parameter that is not found there has the
    name that transformers would store it under.

    Raises:
        UnusableConfigError: transformers cannot build a model from the config.
        NotUnderstoodError: its layers are not understood, or only its own code knows them.
        ModelError: its type is unknown, or the model is not decoder-only.
    """
    source = make_source(folder, config)
    try:
        skeleton = build_skeleton(source)
    except ModelError as error:
        # no cause: the model is not decoder-only; ImportError: its class needs another package
        if error.__cause__ is None or isinstance(error.__cause__, ImportError):
            raise
        raise UnusableConfigError(error.message, hint=error.hint) from error
    checkpoint = open_leniently(folder)
    dtype = find_dtype(config) or stored_dtype(checkpoint)
    dtype = dtype if dtype in DTYPES else "bfloat16"
    try:
        weights = WeightSource(skeleton, checkpoint)
        absent, leftovers = compare_names(weights)
        names = {name: weights.spell(name) for name in absent}
        names |= weights.single_tensors
        try:
            geometry = find_geometry(skeleton, names, checkpoint_dtype=dtype)[0]
        except ModelError as error:
            if type(skeleton).__name__ not in str(config.get("architectures")):
                raise  # the config is of another model
            raise NotUnderstoodError(error.message, hint=error.hint) from error
        found = _name_shapes(skeleton, names)
        # if the text model is wrapped, the checkpoint may hold towers and names that it lacks
        is_wrapped = source.config.get_text_config() is not source.config
        if type(skeleton).__name__ in str(config.get("architectures")) or not is_wrapped:
            found["leftovers"] = tuple(name for each in leftovers.values() for name in each)
            found["renamed"] = tuple(weights.find_renamed())
        return geometry.model_copy(update=found)
    except Fp8CalibError:
        raise
    except Exception as error:
        raise _unusable(folder, error, kind=ModelError) from error


def ask_class(folder: Path, config: Mapping[str, object]) -> KnownStacks:
    """Build the model without weights, and look at its experts and its buffers.

    The class is one of transformers'; of another model nothing is known.
    """
    try:
        skeleton = build_skeleton(make_source(folder, config))
    except ModelError:
        return KnownStacks()
    # `use_experts_implementation` of transformers 5.23 sets these (`integrations/moe.py`).
    flags = ("has_gate", "has_bias", "is_concatenated", "is_transposed")
    found = {
        tuple(getattr(module, flag) for flag in flags)
        for module in skeleton.modules()
        if all(hasattr(module, flag) for flag in flags)
    }
    orders = {(True, False, True, False): OUT_IN, (True, False, True, True): IN_OUT}
    order = orders.get(found.pop()) if len(found) == 1 else None
    text, buffers = skeleton.config.get_text_config(), skeleton.named_buffers()
    return KnownStacks(
        stacks={} if order is None else PARAMETERS,
        order=order or OUT_IN,
        model_type=text.model_type,
        hidden_size=getattr(text, "hidden_size", 0),
        buffers=frozenset(cut_name(name) for name, each in buffers if each.ndim > 2),
    )


def is_known(config: Mapping[str, object]) -> bool:
    """Tell whether transformers knows the model type, and so its layers."""
    model_type = config.get("model_type")
    return isinstance(model_type, str) and model_type in CONFIG_MAPPING


def parse_config(config: Mapping[str, Any]) -> Any:
    """Read a config of a known type as transformers' class does, which may refuse it."""
    return let_layers_differ(CONFIG_MAPPING[str(config["model_type"])].from_dict(config))


def complete_heads(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace `head_dim: null` by the hidden size by heads, as vLLM 0.32.0 does (run)."""
    found = {
        key: complete_heads(value) if isinstance(value, dict) else value
        for key, value in config.items()
    }
    hidden, heads = found.get("hidden_size"), found.get("num_attention_heads")
    if found.get("head_dim", 0) is None:
        del found["head_dim"]
        if type(hidden) is int and type(heads) is int and heads > 0:
            found["head_dim"] = hidden // heads
    return found


def restore_floats(value: object) -> Any:
    """Replace the objects that stand for floats by these floats, at any depth."""
    if isinstance(value, list):
        return [restore_floats(item) for item in value]
    if not isinstance(value, Mapping):
        return value
    name = value.get("__float__") if len(value) == 1 else None
    if isinstance(name, str) and name in _FLOATS:
        return _FLOATS[name]
    return {key: restore_floats(item) for key, item in value.items()}


def make_source(folder: Path, config: Mapping[str, object]) -> ModelSource:
    """Read a config as transformers does, without its quantization."""
    try:
        plain = restore_floats(without_quantization(config))
    except RecursionError as error:
        raise _unusable(folder, "it is nested too deeply") from error
    if not is_known(plain):
        unknown = f"model_type {plain.get('model_type')!a:.60} is unknown to this tool"
        if "auto_map" in plain:
            raise NotUnderstoodError(
                f"{folder}: {unknown}: only code of its own knows it, which is not run",
                hint="use --model MODEL, a model of a known type with the same layers",
            )
        fault, hint = unknown, "use --model MODEL, the model that the scales belong to"
        if config:
            hint = f"update transformers, or {hint}"
        else:
            fault = "there is no config.json"
            hint += "; merge an adapter into its model"
        raise ModelError(f"{folder}: {fault}, so the model's layers are not known", hint=hint)
    plain = complete_heads(plain)
    for section in (plain, *(value for value in plain.values() if isinstance(value, dict))):
        for key, value in section.items():
            # absurd sizes are refused before transformers builds a model of that size
            most = MAX_LAYERS if key in LAYER_COUNTS else _MAX_SIZE
            least = 1 if key in LAYER_COUNTS and section is plain else -most
            if type(value) is int and not least <= value <= most:
                raise _unusable(folder, f"{key!a:.60} is out of range")
        for key in ("dtype", "torch_dtype"):
            if "float8" in str(section.get(key)):
                section[key] = "bfloat16"  # vLLM 0.32.0 (run) serves such a model in 16 bits
    try:
        parsed = parse_config(plain)
    except Exception as error:
        raise _unusable(folder, error) from error
    return ModelSource(folder=folder, config=parsed, raw_config=plain, trust_remote_code=False)


def _unusable(
    folder: Path, error: Exception | str, *, kind: type[ModelError] = UnusableConfigError
) -> ModelError:
    why = shorten(" ".join(str(error).split()) or type(error).__name__)
    return kind(
        f"{folder}/config.json: transformers cannot use it: {why}",
        hint="use the config.json that the model was published with, or --model MODEL",
    )


def _name_shapes(skeleton: LoadedModel, names: Mapping[str, str]) -> dict[str, object]:
    """Give the fields of a geometry with the shapes of parameters, by names in the checkpoint."""
    weights = {
        f"{path}.weight": module
        for path, module in skeleton.named_modules()
        if isinstance(module, nn.Linear)
    }
    return {
        "matrices": {
            names[name]: (module.out_features, module.in_features)
            for name, module in weights.items()
            if name in names
        },
        "tied": {
            names.get(name, name): names.get(others[0], others[0])
            for name, others in tied_names(skeleton).items()
            if name in weights
        },
        "parameters": {
            names[name]: tuple(value.shape)
            for name, value in skeleton.state_dict().items()
            if name in names and value.is_floating_point()
        },
    }
