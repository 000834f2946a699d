"""Read the quantization configs of compressed-tensors, ModelOpt and Quark."""

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
    make_fbgemm_finder,
    make_fp8_finder,
    make_scheme,
    matches_entry,
    read_block,
    read_list,
    refuse_ignored,
    weight_contradiction,
)
from fp8calib.dialects.kv.config import MODELOPT_CONFIG_NAME, load_object
from fp8calib.dialects.refusals import refusal
from fp8calib.fp8.schemes import SCHEMES

_EMBEDDING_MARKS = ("embed", "wte", "word_embeddings")


def load_finder(folder: Path, config: Fields) -> tuple[str, FindScheme]:
    """Find the `quant_method` of a checkpoint, and the function that gives each linear's scheme.

    Raises:
        VerificationError: there is no quantization config, or its method is not supported.
    """
    path = folder / CONFIG_NAME
    section = next((section for _, section in find_quantization_configs(config)), None)
    if section is None and (folder / MODELOPT_CONFIG_NAME).is_file():
        path = folder / MODELOPT_CONFIG_NAME
        section = {**load_object(path), "quant_method": "modelopt"}
    if section is None:
        hint = "engines learn from it how inputs are quantized; copy the checkpoint's config"
        raise refusal(path, "the weights are FP8, but there is no quantization_config", hint=hint)
    method = section.get("quant_method")
    if isinstance(method, str) and method.startswith("modelopt"):
        method = "modelopt"
    if not isinstance(method, str) or method not in _FINDERS:
        known = ", ".join(_FINDERS)
        raise refusal(
            path, f"quant_method is {method!a:.40}", hint=f"supported FP8 methods: {known}"
        )
    return method, _FINDERS[method](path, section)


def _make_group_finder(path: Path, config: Fields) -> FindScheme:
    """Read the config of compressed-tensors: groups of linears, by name, expression or class."""
    groups = config.get("config_groups")
    if not isinstance(groups, dict) or not all(isinstance(item, dict) for item in groups.values()):
        raise refusal(
            path, f"config_groups is {groups!a:.60}", hint="it must be an object of groups"
        )
    if config.get("transform_config"):
        hint = "the weights cannot be used without these rotations"
        raise refusal(path, "transform_config rotates tensors while serving", hint=hint)
    ignored = read_list(path, config, "ignore")
    targets = {
        target: group
        for group in groups.values()
        for target in read_list(path, group, "targets")
        if isinstance(target, str)
    }

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, operator.eq)
        group = targets.get(_find_target(path, module, targets) or "")
        if group is None:
            raise weight_contradiction(path, module, "no config group has it")
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
    """Find the target that applies, in the order of compressed-tensors: name, expression, class."""
    if module in targets:
        return module
    expressions = sorted(target for target in targets if target.startswith("re:"))
    for target in expressions:
        if matches_entry(path, module, target.removeprefix("re:")):
            return target
    is_embedding = any(mark in module.rpartition(".")[2] for mark in _EMBEDDING_MARKS)
    kind = "Embedding" if is_embedding else "Linear"
    return next((target for target in targets if "." not in target and kind in target), None)


def _read_arguments(path: Path, module: str, fields: object) -> Arguments:
    """Read the arguments of one quantizer; missing keys have compressed-tensors' defaults."""
    if not isinstance(fields, dict):
        raise weight_contradiction(path, module, f"the config says {fields!a:.60}")
    kind, num_bits = fields.get("type", "int"), fields.get("num_bits", 8)
    if (str(kind).lower(), num_bits) != ("float", 8):
        says = f"the config says {num_bits!a:.20} bits of {kind!a:.20}"
        raise weight_contradiction(path, module, says)
    if fields.get("symmetric", True) is not True:
        raise refusal(path, f"{module}: FP8 with zero points is not supported")
    size, block, dynamic = (fields.get(k) for k in ("group_size", "block_structure", "dynamic"))
    strategy = fields.get("strategy") or ("tensor" if size is None else "group")
    if dynamic not in (None, True, False):
        raise refusal(
            path, f"{module}: dynamic is {dynamic!a:.40}", hint="it must be true or false"
        )
    return Arguments(
        strategy=str(strategy).lower(),
        dynamic=bool(dynamic),
        group_size=size if type(size) is int else None,
        block=None if block is None else read_block(path, "block_structure", block),
    )


_MODELOPT_BLOCKS = ("FP8_PB_WO", "FP8_BLOCK_SCALES")
"""Names of fp8-block that are read and not written. `FP8_PB_WO` was made for weights alone; engines
quantize its inputs by groups of 128 (vLLM 0.32.0 `modelopt.py:resolve`). `FP8_BLOCK_SCALES` is
another name for it (vLLM 0.32.0 and SGLang 0.5.23 accept it in mixed precision)."""


def _read_algorithm(name: object) -> StoredScheme | None:
    """Find the scheme of a ModelOpt `quant_algo`; None where it is not FP8."""
    named = {scheme.modelopt: scheme for scheme in SCHEMES.values() if scheme.modelopt}
    named |= dict.fromkeys(_MODELOPT_BLOCKS, SCHEMES["fp8-block"])
    scheme = named.get(str(name).upper())
    if scheme is None:
        return None
    return StoredScheme(weights=scheme.weights, block=scheme.block, inputs=scheme.inputs)


def _make_modelopt_finder(path: Path, config: Fields) -> FindScheme:
    """Read ModelOpt's config, from config.json or hf_quant_config.json."""
    inner = config.get("quantization")
    fields = inner if isinstance(inner, dict) else config
    ignored = [
        *read_list(path, fields, "exclude_modules"),
        *read_list(path, fields, "ignore"),
    ]
    layers = fields.get("quantized_layers")
    by_layer = layers if isinstance(layers, dict) else {}
    algorithm = fields.get("quant_algo")

    def find(module: str) -> StoredScheme:
        refuse_ignored(path, module, ignored, fnmatchcase)
        own = _find_layer(module, by_layer) if algorithm == "MIXED_PRECISION" else algorithm
        scheme = _read_algorithm(own)
        if scheme is None:
            raise weight_contradiction(path, module, f"its quant_algo is {own!a:.40}")
        return scheme

    return find


def _find_layer(module: str, layers: Fields) -> object:
    """Find the algorithm of `module`, or of the nearest module above it that the config lists."""
    place = module
    while place and place not in layers:
        place = place.rpartition(".")[0]
    fields = layers.get(place)
    return fields.get("quant_algo") if isinstance(fields, dict) else None


def _make_quark_finder(path: Path, config: Fields) -> FindScheme:
    """Read Quark's config: linears by name, then by class, then all others."""
    ignored = read_list(path, config, "exclude")
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
            raise weight_contradiction(path, module, f"the config says {fields!a:.60}")
        weights = _read_spec(path, module, fields.get("weight"))
        inputs = _read_spec(path, module, fields.get("input_tensors"))
        if weights is None:
            raise weight_contradiction(path, module, "the config says unquantized")
        return make_scheme(path, module, weights, inputs)

    return find


_QUARK_STRATEGIES = {
    "per_tensor": "tensor",
    "per_channel": "channel",
    "per_block": "block",
    "per_group": "group",
}


def _read_spec(path: Path, module: str, spec: object) -> Arguments | None:
    """Read Quark's spec of one tensor; None where the tensor is not quantized."""
    fields = spec[0] if isinstance(spec, list) and len(spec) == 1 else spec
    if fields is None:
        return None
    if not isinstance(fields, dict) or fields.get("dtype") != "fp8_e4m3":
        raise weight_contradiction(path, module, f"the config says {fields!a:.60}")
    strategy = _QUARK_STRATEGIES.get(str(fields.get("qscheme")), str(fields.get("qscheme")))
    size, block = fields.get("group_size"), fields.get("block_size")
    is_dynamic = fields.get("is_dynamic") is True
    if is_dynamic and strategy == "channel":
        strategy = "token"
    return Arguments(
        strategy=strategy,
        dynamic=is_dynamic,
        group_size=size if type(size) is int else None,
        block=None if block is None else read_block(path, "block_size", block),
    )


_FINDERS = {
    "compressed-tensors": _make_group_finder,
    "fp8": make_fp8_finder,
    "modelopt": _make_modelopt_finder,
    "quark": _make_quark_finder,
    "fbgemm_fp8": make_fbgemm_finder,
}
