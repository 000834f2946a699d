"""Settings of sampling and quantization that the libraries certainly accept."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.checkpoint.model_config import find_quantization_configs
from fp8calib.errors import ModelError

GENERATION_NAME = "generation_config.json"
_SWITCHES = ("_from_model_config", "do_sample", "use_cache")
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_MOST = {"temperature": 2.0, "top_p": 1.0, "repetition_penalty": 10.0}
_FORMATS = ("float-quantized", "naive-quantized", "dense")
_SECTION = (
    *("quant_method", "format", "quantization_status", "ignore", "config_groups"),
    *("kv_cache_scheme", "version", "global_compression_ratio"),
    *("sparsity_config", "transform_config"),
)
_GROUP = ("targets", "weights", "input_activations", "output_activations", "format")
_ARGUMENTS = {
    "num_bits": 8,
    "type": "float",
    "symmetric": True,
    "actorder": None,
    "observer_kwargs": {},
    "scale_dtype": None,
    "zp_dtype": None,
}
"""The keys of a scheme that have one value here."""
_OBSERVERS = (None, "minmax", "static_minmax", "memoryless_minmax", "mse", "memoryless_mse")
_SIZES = {"block": (None, [128, 128]), "group": (128, None)}
"""By strategy: `group_size` and `block_structure`."""


def has_plain_sections(folder: Path, config: Mapping[str, object]) -> bool:
    """Tell whether transformers and compressed-tensors certainly accept a folder's settings."""
    sections = [section for _, section in islice(find_quantization_configs(config), 1)]
    if any(_is_compressed_tensors(each) and not _is_plain_section(each) for each in sections):
        return False
    path = folder / GENERATION_NAME
    try:
        return not path.is_file() or _is_plain_generation(load_json_object(path))
    except ModelError:
        return False


def _is_plain_generation(document: Mapping[str, object]) -> bool:
    for key, value in document.items():
        if key in _SWITCHES:
            is_plain = isinstance(value, bool)
        elif key in ("output_attentions", "output_hidden_states"):
            is_plain = value is False
        elif key in _TOKENS:
            several = value if isinstance(value, list) and key == "eos_token_id" else [value]
            is_plain = all(type(each) is int and each >= 0 for each in several)
        elif key in ("top_k", "max_length", "max_new_tokens"):
            is_plain = type(value) is int and value > 0
        elif key in _MOST:
            is_plain = isinstance(value, float) and 1e-3 <= value <= _MOST[key]
        else:
            is_plain = key == "transformers_version" and isinstance(value, str)
        if not is_plain:
            return False
    return True


def _is_compressed_tensors(section: Mapping[str, object]) -> bool:
    return str(section.get("quant_method")).replace("_", "-") == "compressed-tensors"


def _is_plain_section(section: Mapping[str, object]) -> bool:
    """Recognise what `quantize`, overlays and llm-compressor write for FP8."""
    groups = section.get("config_groups")
    return (
        section.keys() <= set(_SECTION)
        and section.get("quant_method") == "compressed-tensors"
        and section.get("format") in _FORMATS
        and section.get("quantization_status") == "compressed"
        and section.get("global_compression_ratio") is None
        and section.get("sparsity_config", {}) == {}
        and section.get("transform_config", {}) == {}
        and isinstance(section.get("version", ""), str)
        and _is_texts(section.get("ignore", []))
        and isinstance(groups, dict)
        and all(map(_is_plain_group, groups.values()))
        and _is_plain_scheme(section.get("kv_cache_scheme"), "cache")
    )


def _is_plain_group(group: object) -> bool:
    return (
        isinstance(group, dict)
        and group.keys() <= set(_GROUP)
        and bool(group.get("targets"))
        and _is_texts(group.get("targets"))
        and group.get("weights") is not None
        and group.get("output_activations") is None
        and group.get("format", _FORMATS[0]) in _FORMATS
        and _is_plain_scheme(group.get("weights"), "weights")
        and _is_plain_scheme(group.get("input_activations"), "inputs")
    )


def _is_plain_scheme(scheme: object, kind: str) -> bool:
    if scheme is None:
        return True
    if not isinstance(scheme, dict):
        return False
    strategy = scheme.get("strategy")
    sizes = scheme.get("group_size"), scheme.get("block_structure")
    chosen = {
        "weights": {("tensor", False), ("channel", False), ("block", False)},
        "inputs": {("tensor", False), ("token", True), ("group", True)},
        "cache": {("tensor", False)},
    }
    by_rule = ("strategy", "dynamic", "observer", "group_size", "block_structure")
    rest = {key: each for key, each in scheme.items() if key not in by_rule}
    is_dynamic, observer = scheme.get("dynamic", False), scheme.get("observer")
    return (
        isinstance(strategy, str)
        and isinstance(is_dynamic, bool)
        and (strategy, is_dynamic) in chosen[kind]
        and sizes == _SIZES.get(strategy, (None, None))
        and observer in (_OBSERVERS if not is_dynamic else _OBSERVERS[:1])
        and rest.get("num_bits") == 8
        and rest.get("type") == "float"
        and all(key in _ARGUMENTS and _is_same(each, _ARGUMENTS[key]) for key, each in rest.items())
    )


def _is_same(value: object, usual: object) -> bool:
    return type(value) is type(usual) and value == usual


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)
