"""Which KV cache method vLLM chooses for a `quantization_config`, or why it does not start.

Sources: `transformers_utils/config.py`, `model_arch_config_convertor.py` there
(`_normalize_quantization_config`), `config/model.py` (`_verify_quantization`) and
`model_executor/layers/quantization/` (`fp8.py`, `compressed_tensors/`, `modelopt.py`,
`quark/quark.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from enum import StrEnum

from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.declared import find_modelopt_section
from fp8calib.engines.replay.verdicts import Refusal, Unjudged

KvMethod = StrEnum("KvMethod", ["COMPRESSED_TENSORS", "FP8", "MODELOPT", "QUARK", "NONE"])

_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_WITHOUT_KV = (
    *("awq", "auto_awq", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming"),
    *("experts_int8", "moe_wna16", "torchao", "inc", "auto-round", "mxfp4", "gpt_oss_mxfp4"),
)
"""Methods without parameters for KV scales: scales in the checkpoint are ignored."""
_FP8_METHODS = ("fp8", "deepseek_v4_fp8")
"""`Fp8Config`, and its subclass (`models/deepseek_v4/quant_config.py`)."""
_OWN_FILE_ALGORITHM = "own-file-algorithm"
"""ModelOpt's algorithms that are accepted if `hf_quant_config.json` (nested) is the only config."""
_ALGORITHM = "config.json-algorithm"
_NVFP4_FIELDS = ("group_size", "kv_cache_quant_algo", "exclude_modules")
"""Keys that NVFP4 needs in ModelOpt's own file (modelopt.py `_from_config`)."""
_EXPORT_AGAIN = "export the checkpoint again, with hf_quant_config.json"


def find_kv_method(
    quantization: Mapping[str, object], release: Release, *, beside: object = None
) -> KvMethod | None:
    """Find the method that loads KV scales; None if the config names none.

    `Refusal` is raised by the checks that vLLM makes for every model. `beside` is the content of
    `hf_quant_config.json`, which lists the layers of a mixed precision.
    """
    method = name_method(quantization, release)
    if not method:
        return None
    if method.startswith("modelopt"):
        return _check_modelopt(quantization, release, beside)
    if method == "compressed-tensors":
        _check_compressed(quantization)
        return KvMethod.COMPRESSED_TENSORS
    if method == "quark":
        _check_quark(quantization)
        return KvMethod.QUARK
    if method in _FP8_METHODS:
        scheme = quantization.get("activation_scheme")
        has_blocks = quantization.get("weight_block_size") is not None
        if scheme not in ("static", "dynamic") or (has_blocks and scheme == "static"):
            blocks = " for weights in blocks" if has_blocks else ""
            raise Unjudged(f"activation_scheme is {scheme!a:.40}{blocks}, which no tool writes")
        return KvMethod.FP8
    if method == "mxfp8" or method in _WITHOUT_KV:
        return KvMethod.MODELOPT if method == "mxfp8" else KvMethod.NONE
    why = f"quant_method {method!a:.60} is unknown to {release.title}"
    fix = "correct the name of the method"
    if method in _DEPRECATED:
        why = f"quant_method {method} is refused without --allow-deprecated-quantization"
        fix = "quantize with compressed-tensors instead"
    raise Refusal(why, fix=fix)


def name_method(quantization: Mapping[str, object], release: Release) -> str:
    """Name the method in lower case; empty if the config names none: the model is not quantized.

    ModelOpt's own file names an algorithm instead, and has to say that ModelOpt wrote it.
    """
    section = quantization.get("quantization")
    section = section if isinstance(section, dict) else {}
    algorithm = section.get("quant_algo")
    is_marked = "modelopt_quant_config" in section
    if algorithm is not None and (is_marked or _is_of_modelopt(quantization)):
        if str(algorithm).upper() not in release.values[_OWN_FILE_ALGORITHM]:
            why = f"Unknown ModelOpt quant algo: {algorithm!a:.60} (ValueError)"
            fix = "store it in config.json's quantization_config, where vLLM accepts more of them"
            raise Refusal(why, fix=fix)
        return "modelopt"
    method = quantization.get("quant_method", "")
    if not isinstance(method, str):
        raise Refusal("quant_method is not a string", fix="name the method there")
    return method.lower().replace("compressed_tensors", "compressed-tensors")


def _check_modelopt(
    quantization: Mapping[str, object], release: Release, beside: object
) -> KvMethod:
    section = find_modelopt_section(quantization)
    algorithm = str(section.get("quant_algo") or "").upper()
    algorithms = release.values[_ALGORITHM]
    missing = ", ".join(key for key in _NVFP4_FIELDS if key not in section)
    why, fix = "", _EXPORT_AGAIN
    if not algorithm:
        why = "vLLM refuses a ModelOpt config without quant_algo, even for the KV cache alone"
        why = f"Missing 'quant_algo' in quantization config: {why}"
        fix = "write the scales as compressed-tensors does (kv-overlay)"
    elif algorithm not in algorithms:
        why = f"quant_algo {section['quant_algo']!a:.60} is unknown to {release.title}"
        fix = f"use one of {', '.join(algorithms)}"
    elif section is not quantization and algorithm == "NVFP4" and missing:
        why = f"NVFP4 needs {missing} in hf_quant_config.json (ValueError)"
    if why:
        raise Refusal(why, fix=fix)
    _require_names(section, name_exclusion_list(quantization, section, release))
    if algorithm != "MIXED_PRECISION":
        return KvMethod.MODELOPT
    outer = quantization
    if "quantized_layers" not in quantization:
        outer = beside if isinstance(beside, dict) else {}
        if outer and not _is_of_modelopt(outer):
            why = "hf_quant_config.json does not name modelopt as its producer (ValueError)"
    section = find_modelopt_section(outer)
    if not why and not section.get("quantized_layers"):
        why = "MIXED_PRECISION needs quantized_layers, here or in hf_quant_config.json"
    if why:
        raise Refusal(why, fix=_EXPORT_AGAIN)
    # a mixed precision has a KV method only where its config asks for one
    has_method = section.get("kv_cache_quant_algo")
    if section is outer:
        scheme = outer.get("kv_cache_scheme")
        kind = (scheme.get("type"), scheme.get("num_bits")) if isinstance(scheme, dict) else ()
        has_method = kind == ("float", 8)
    return KvMethod.MODELOPT if has_method else KvMethod.NONE


def _is_of_modelopt(own_file: Mapping[str, object]) -> bool:
    producer = own_file.get("producer")
    return isinstance(producer, dict) and producer.get("name") == "modelopt"


def name_exclusion_list(
    quantization: Mapping[str, object], section: Mapping[str, object], release: Release
) -> str:
    """Name the key under which ModelOpt's method finds the modules that stay unquantized."""
    if "quantization" in quantization:
        return "exclude_modules"
    keys = release.values["modelopt-list"]
    return next((key for key in keys if key in section), keys[-1])


def _check_compressed(quantization: Mapping[str, object]) -> None:
    """Check the config of compressed-tensors, except its KV scheme and what is in its groups."""
    groups = quantization.get("config_groups", {})
    for group in groups.values() if isinstance(groups, dict) else [groups]:
        fields = group if isinstance(group, dict) else {}
        targets = fields.get("targets")
        listed = targets if isinstance(targets, list) else []
        names = [each for each in listed if isinstance(each, str)]
        # without weights a group has no targets, or a class of attention
        is_bare = not isinstance(fields.get("weights"), dict)
        is_of_attention = len(names) == 1 and names[0].endswith("Attention")
        if names != targets or (names and is_bare and not is_of_attention):
            raise Unjudged("config_groups is not what compressed-tensors writes")
    _require_names(quantization, "ignore")
    sparsity = quantization.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("targets"):
        why = "sparsity_config has targets; vLLM no longer supports sparsity (DeprecationWarning)"
        raise Refusal(why, fix="use a model without sparsity")


def _require_names(section: Mapping[str, object], key: str) -> None:
    found = section.get(key, [])
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise Unjudged(f"{key} is {found!a:.40}, not a list of names")


def _check_quark(quantization: Mapping[str, object]) -> None:
    export = quantization.get("export")
    named = export.get("kv_cache_group") if isinstance(export, dict) else None
    if not isinstance(named, list) or not isinstance(quantization.get("exclude"), list):
        raise Unjudged("the Quark config lacks a list: exclude, or export.kv_cache_group")
    group = [pattern for pattern in named if isinstance(pattern, str)]
    if not group:
        return
    layers = quantization.get("layer_quant_config")
    found = [
        config.get("output_tensors")
        for name, config in (layers if isinstance(layers, dict) else {}).items()
        if isinstance(config, dict) and any(fnmatch.fnmatchcase(name, item) for item in group)
    ]
    if not found or any(tensors != found[0] for tensors in found):
        why = "layer_quant_config lacks export.kv_cache_group, or its output_tensors differ there"
        raise Unjudged(why)
    tensors = found[0] if isinstance(found[0], dict) else {}
    if (tensors.get("dtype"), tensors.get("qscheme")) != ("fp8_e4m3", "per_tensor"):
        why = "Quark's KV scales must be fp8_e4m3 and per_tensor: NotImplementedError at start"
        raise Refusal(why, fix="quantize the cache per tensor")
