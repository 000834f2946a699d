"""The quantization configs that tell linears apart: compressed-tensors, ModelOpt, Quark."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path

from fp8calib.checkpoint.model_config import CONFIG_NAME, find_quantization_configs
from fp8calib.dialects.fp8.quantization_config import (
    Arguments,
    Fields,
    FindScheme,
    StoredScheme,
    contradiction,
    make_fbgemm_finder,
    make_fp8_finder,
    make_scheme,
    matches_expression,
    refuse_ignored,
    take_block,
    take_list,
)
from fp8calib.dialects.kv.config import MODELOPT_CONFIG_NAME, load_object
from fp8calib.dialects.refusals import refusal
from fp8calib.fp8.schemes import SCHEMES

_EMBEDDING_MARKS = ("embed", "wte", "word_embeddings")


def load_finder(folder: Path, config: Fields) -> tuple[str, FindScheme]:
    """Give the `quant_method` of a checkpoint, and what finds the scheme of its linears.

    Raises:
        VerificationError: there is no quantization config, or none that is read here.
    """
    path = folder / CONFIG_NAME
    section = next((section for _, section in find_quantization_configs(config)), None)
    if section is None and (folder / MODELOPT_CONFIG_NAME).is_file():
        path = folder / MODELOPT_CONFIG_NAME
        section = {**load_object(path), "quant_method": "modelopt"}
    if section is None:
        hint = "engines need it to know how inputs are quantized; copy the config of the checkpoint"
        raise refusal(path, "there is no quantization_config beside FP8 weights", hint=hint)
    method = section.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt"):
        method = "modelopt"
    if not isinstance(method, str) or method not in _FINDERS:
        known = ", ".join(_FINDERS)
        raise refusal(path, f"quant_method is {method!a:.40}", hint=f"FP8 methods read: {known}")
    return method, _FINDERS[method](path, section)


def _make_group_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of compressed-tensors: groups of linears, by name, expression or class."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(item, dict) for item in groups.values()):
        raise refusal(path, f"config_groups is {groups!a:.60}", hint="it is an object of groups")
    if config.get("transform_config"):
        hint = "its weights mean something else without the rotations"
        raise refusal(path, "transform_config rotates tensors while serving", hint=hint)
    ignored = take_list(path, config, "ignore")
    targets = {
        target: group
        for group in groups.values()
        for target in take_list(path, group, "targets")
        if isinstance(target, str)
    }

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, operator.eq)
        group = targets.get(_find_target(path, module, targets) or "")
        if group is None:
            raise contradiction(path, f"{module}: its weight is FP8, but no group of the config's")
        weights = _read_arguments(path, module, group.get("weights"))
        inputs = group.get("input_activations")
        return make_scheme(
            path,
            module,
            weights,
            None if inputs is None else _read_arguments(path, module, inputs),
        )

    return find


def _find_target(path: Path, module: str, targets: Mapping[str, object]) -> str | None:
    """Find the target that decides, as compressed-tensors does: name, expression, class."""
    if module in targets:
        return module
    expressions = sorted(target for target in targets if target.startswith("re:"))
    for target in expressions:
        if matches_expression(path, module, target.removeprefix("re:")):
            return target
    is_embedding = any(mark in module.rpartition(".")[2] for mark in _EMBEDDING_MARKS)
    kind = "Embedding" if is_embedding else "Linear"
    return next((target for target in targets if "." not in target and kind in target), None)


def _read_arguments(path: Path, module: str, fields: object) -> Arguments:
    """Read one quantizer; a key that is missing has compressed-tensors' default."""
    if not isinstance(fields, dict):
        raise contradiction(path, f"{module}: its weight is FP8, the config says {fields!a:.60}")
    kind, num_bits = fields.get("type", "int"), fields.get("num_bits", 8)
    if (str(kind).lower(), num_bits) != ("float", 8):
        fault = (
            f"{module}: its weight is FP8, the config says {num_bits!a:.20} bits of {kind!a:.20}"
        )
        raise contradiction(path, fault)
    if fields.get("symmetric", True) is not True:
        raise refusal(path, f"{module}: FP8 with zero points is not read")
    size, block, dynamic = (fields.get(k) for k in ("group_size", "block_structure", "dynamic"))
    strategy = fields.get("strategy") or ("tensor" if size is None else "group")
    if dynamic not in (None, True, False):
        raise refusal(path, f"{module}: dynamic is {dynamic!a:.40}", hint="it is true or false")
    return Arguments(
        strategy=str(strategy).lower(),
        dynamic=bool(dynamic),
        group_size=size if type(size) is int else None,
        block=None if block is None else take_block(path, "block_structure", block),
    )


_MODELOPT_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
"""Two names of blocks of 128 x 128. `FP8_PB_WO` was made for weights alone; engines quantize its
inputs by groups of 128 (vLLM 0.32.0 `modelopt.py:resolve`). `FP8_BLOCK_SCALES` is another name of
the same (vLLM 0.32.0 and SGLang 0.5.23 take it in a mixed precision)."""


def _read_algorithm(name: object) -> StoredScheme | None:
    """Give what a `quant_algo` of ModelOpt means; None where it is not FP8."""
    named = {scheme.modelopt: scheme for scheme in SCHEMES.values() if scheme.modelopt}
    named |= dict.fromkeys(_MODELOPT_BLOCKS, SCHEMES["fp8-block"])
    scheme = named.get(str(name).upper())
    if scheme is None:
        return None
    return StoredScheme(granularity=scheme.weights, block=scheme.block, input=scheme.inputs)


def _make_modelopt_finder(path: Path, config: Fields) -> FindScheme:
    """Read ModelOpt's config, in either file's form."""
    inner = config.get("quantization")
    fields = inner if isinstance(inner, dict) else config
    ignored = [
        *take_list(path, fields, "exclude_modules"),
        *take_list(path, fields, "ignore"),
    ]
    layers = fields.get("quantized_layers")
    by_layer = layers if isinstance(layers, dict) else {}
    algorithm = fields.get("quant_algo")

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, fnmatchcase)
        own = _find_layer(module, by_layer) if algorithm == "MIXED_PRECISION" else algorithm
        scheme = _read_algorithm(own)
        if scheme is None:
            raise contradiction(path, f"{module}: its weight is FP8, its quant_algo {own!a:.40}")
        return scheme

    return find


def _find_layer(module: str, layers: Fields) -> object:
    """Find the algorithm of the nearest module at or above `module` that the config lists."""
    place = module
    while place and place not in layers:
        place = place.rpartition(".")[0]
    fields = layers.get(place)
    return fields.get("quant_algo") if isinstance(fields, dict) else None


def _make_quark_finder(path: Path, config: Fields) -> FindScheme:
    """Read Quark's config: linears by name, then by class, then all others."""
    ignored = take_list(path, config, "exclude")
    by_name, by_class = (
        section if isinstance(section := config.get(key), dict) else {}
        for key in ("layer_quant_config", "layer_type_quant_config")
    )
    of_linears = (by_class[name] for name in by_class if "Linear" in name)
    fallback = next(of_linears, config.get("global_quant_config"))

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, fnmatchcase)
        named = (by_name[pattern] for pattern in by_name if fnmatchcase(module, pattern))
        fields = next(named, fallback)
        if not isinstance(fields, dict):
            raise contradiction(
                path, f"{module}: its weight is FP8, the config says {fields!a:.60}"
            )
        weights = _read_spec(path, module, fields.get("weight"))
        inputs = _read_spec(path, module, fields.get("input_tensors"))
        if weights is None:
            raise contradiction(path, f"{module}: its weight is FP8, the config says unquantized")
        return make_scheme(path, module, weights, inputs)

    return find


_QUARK_STRATEGIES = {
    "per_tensor": "tensor",
    "per_channel": "channel",
    "per_block": "block",
    "per_group": "group",
}


def _read_spec(path: Path, module: str, spec: object) -> Arguments | None:
    """Read one tensor's spec of Quark's; None where there is none."""
    fields = spec[0] if isinstance(spec, list) and len(spec) == 1 else spec
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.get("dtype") != "fp8_e4m3":
        raise contradiction(path, f"{module}: its weight is FP8, the config says {fields!a:.60}")
    strategy = _QUARK_STRATEGIES.get(str(fields.get("qscheme")), str(fields.get("qscheme")))
    size, block = fields.get("group_size"), fields.get("block_size")
    is_dynamic = fields.get("is_dynamic") is True
    if is_dynamic and strategy == "channel":
        strategy = "token"
    return Arguments(
        strategy=strategy,
        dynamic=is_dynamic,
        group_size=size if type(size) is int else None,
        block=None if block is None else take_block(path, "block_size", block),
    )


_FINDERS = {
    "compressed-tensors": _make_group_finder,
    "fp8": make_fp8_finder,
    "modelopt": _make_modelopt_finder,
    "quark": _make_quark_finder,
    "fbgemm_fp8": make_fbgemm_finder,
}
