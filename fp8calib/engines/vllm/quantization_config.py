"""Which KV cache method vLLM chooses for a `quantization_config`, or why it does not start.

Sources: `transformers_utils/config.py`, `model_arch_config_convertor.py` there
(`_normalize_quantization_config`), `config/model.py` (`_verify_quantization`) and
`model_executor/layers/quantization/` (`fp8.py`, `compressed_tensors/`, `modelopt.py`,
`quark/quark.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from enum import StrEnum

from fp8calib.dialects.kv.config import SCHEME_HINT, find_scheme_fault
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_modelopt_section
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.vllm.releases import Release

CONFIG_KEYS = (
    "quantization_config",
    "modelopt",
    "text_config.quantization_config",
    "compression_config",
)
"""Where vLLM looks for the quantization config, in order."""
KvMethod = StrEnum("KvMethod", ["COMPRESSED_TENSORS", "FP8", "MODELOPT", "QUARK", "NONE"])

_LATER_METHODS = (
    *("auto_awq", "auto_gptq", "deepseek_v4_fp8", "gpt_oss_mxfp4", "humming", "mxfp8"),
)
"""Methods that not all releases know: `Release.methods` are those that one does."""
_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_WITHOUT_KV = (
    *("awq", "auto_awq", "auto_gptq", "gptq", "gptq_marlin", "awq_marlin", "humming"),
    *("experts_int8", "moe_wna16", "torchao", "inc", "auto-round", "mxfp4", "gpt_oss_mxfp4"),
)
"""Methods without parameters for KV scales: scales in the checkpoint are ignored."""
_FP8_METHODS = ("fp8", "deepseek_v4_fp8")
"""`Fp8Config`, and its subclass (`models/deepseek_v4/quant_config.py`)."""
_ANY_PATH = "any.path"
_BITS = 8
_GROUPS_FIX = "write config_groups as kv-overlay does, or remove the group"


def find_kv_method(
    quantization: Mapping[str, object], release: Release, *, beside: object = None
) -> KvMethod | None:
    """Find the method that loads KV scales, after the checks that vLLM makes.

    Args:
        quantization: the config that vLLM uses.
        release: whose rules hold.
        beside: the content of `hf_quant_config.json`, which lists the layers of a mixed precision.

    Returns:
        The method; None where none is named, so that the model is loaded unquantized.

    Raises:
        Refusal: vLLM does not start with this config.
    """
    method = name_method(quantization, release)
    if not method:
        return None
    unknown = Refusal(
        f"quant_method {method!a:.60} is unknown to {release.title}",
        fix="correct the name of the method",
    )
    if method in _LATER_METHODS and method not in release.methods:
        raise unknown
    if method in release.deprecated_methods:
        why = f"quant_method {method} is refused without --allow-deprecated-quantization"
        raise Refusal(why, fix="quantize with compressed-tensors instead")
    if method.startswith("modelopt"):
        return _check_modelopt(quantization, release, beside)
    if method == "compressed-tensors":
        return _check_compressed(quantization, release)
    checks = {"quark": _check_quark, **dict.fromkeys(_FP8_METHODS, _check_fp8)}
    if method in checks:
        return checks[method](quantization)
    if method == "mxfp8":
        return KvMethod.MODELOPT
    if method in _WITHOUT_KV or method in _DEPRECATED:
        return KvMethod.NONE
    raise unknown


def name_method(quantization: Mapping[str, object], release: Release) -> str:
    """Name the method in lower case; empty where none is named, and the model is not quantized.

    ModelOpt's own file names an algorithm instead, and has to say that ModelOpt wrote it.

    Raises:
        Refusal: vLLM does not start with this config.
    """
    producer, section = quantization.get("producer"), quantization.get("quantization")
    section = section if isinstance(section, dict) else {}
    algorithm = section.get("quant_algo")
    is_own_file = isinstance(producer, dict) and producer.get("name") == "modelopt"
    if algorithm is not None and (is_own_file or "modelopt_quant_config" in section):
        if _fold(algorithm, release) not in release.own_file_algorithms:
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
    algorithm = section.get("quant_algo")
    if not algorithm:
        why = "vLLM refuses a ModelOpt config without quant_algo, even for the KV cache alone"
        fix = "write the scales as compressed-tensors does (kv-overlay)"
        raise Refusal(f"Missing 'quant_algo' in quantization config: {why}", fix=fix)
    if _fold(algorithm, release) not in release.algorithms:
        why = f"quant_algo {algorithm!a:.60} is unknown to {release.title}"
        raise Refusal(why, fix=f"use one of {', '.join(release.algorithms)}")
    _require_names(section, find_exclusions(quantization, section, release), (list,))
    if str(algorithm).upper() == "MIXED_PRECISION":
        return _check_mixed(quantization if "quantized_layers" in quantization else beside)
    return KvMethod.MODELOPT


def _fold(algorithm: object, release: Release) -> str:
    return str(algorithm).upper() if release.folds_case else str(algorithm)


def find_exclusions(
    quantization: Mapping[str, object], section: Mapping[str, object], release: Release
) -> str:
    """Name the list by which ModelOpt's method excludes linears.

    Args:
        quantization: the whole config, where one that is nested has another list.
        section: the part of it with the algorithm.
        release: whose rules hold.
    """
    if "quantization" in quantization:
        return "exclude_modules"
    keys = release.exclusion_keys
    return next((key for key in keys if key in section), keys[-1])


def _check_mixed(quantization: object) -> KvMethod:
    """Check a mixed precision, which has a KV method only where its config asks for one."""
    outer = quantization if isinstance(quantization, dict) else {}
    nested = outer.get("quantization")
    section = nested if isinstance(nested, dict) else outer
    if not section.get("quantized_layers"):
        why = "MIXED_PRECISION needs quantized_layers, here or in hf_quant_config.json"
        raise Refusal(why, fix="export the checkpoint again, with hf_quant_config.json")
    scheme = outer.get("kv_cache_scheme")
    is_fp8 = isinstance(scheme, dict) and (scheme.get("type"), scheme.get("num_bits")) == (
        "float",
        8,
    )
    has_method = section.get("kv_cache_quant_algo") if nested is section else is_fp8
    return KvMethod.MODELOPT if has_method else KvMethod.NONE


def _check_compressed(quantization: Mapping[str, object], release: Release) -> KvMethod:
    _check_scheme(quantization.get("kv_cache_scheme"), release)
    if release.needs_groups and "config_groups" not in quantization:
        raise Refusal("the config has no config_groups (KeyError)", fix=_GROUPS_FIX)
    groups = quantization.get("config_groups", {})
    if not isinstance(groups, dict):
        raise Refusal("config_groups is not an object (AttributeError)", fix=_GROUPS_FIX)
    for name, group in groups.items():
        section = group if isinstance(group, dict) else {}
        _check_group(name, section, quantization.get("ignore"), release)
    _require_names(quantization, "ignore", (list, dict, str))
    sparsity = quantization.get("sparsity_config")
    if release.refuses_sparsity and isinstance(sparsity, dict) and sparsity.get("targets"):
        why = "sparsity_config has targets; vLLM supports sparsity no longer (DeprecationWarning)"
        raise Refusal(why, fix="use a model without sparsity")
    return KvMethod.COMPRESSED_TENSORS


def _check_group(name: str, group: Mapping[str, object], ignore: object, release: Release) -> None:
    """Refuse a group without weights, unless its only target is an attention class (from 0.15).

    Targets that are one text are its letters, which occur in the class of every module: even the
    embedding is then to be quantized, unless all modules are ignored (run).
    """
    targets = group.get("targets")
    if not isinstance(targets, list | dict | str):
        raise Refusal(f"group {name!a:.40} of config_groups has no targets", fix=_GROUPS_FIX)
    if not all(isinstance(target, str) for target in targets):
        raise Refusal(f"group {name!a:.40} has a target that is no text", fix=_GROUPS_FIX)
    if isinstance(targets, str) and targets and not _ignores_all(ignore):
        why = f"the targets of group {name!a:.40} are a text, not a list (ValueError)"
        raise Refusal(why, fix=_GROUPS_FIX)
    is_attention = len(targets) == 1 and next(iter(targets)).endswith("Attention")
    is_attention = is_attention and "attn_head" in release.strategies
    if targets and not is_attention and not isinstance(group.get("weights"), dict):
        why = f"group {name!a:.40} of config_groups has no weights (ValidationError)"
        raise Refusal(why, fix=_GROUPS_FIX)


def _ignores_all(ignore: object) -> bool:
    return isinstance(ignore, list) and any(matches_target(item, _ANY_PATH) for item in ignore)


def _require_names(
    section: Mapping[str, object], key: str, kinds: tuple[type[Iterable[object]], ...]
) -> None:
    """Refuse a list of modules that the engine cannot iterate over, or that holds no texts."""
    found = section.get(key, [])
    if not isinstance(found, kinds) or not all(isinstance(item, str) for item in found):
        raise Refusal(
            f"{key} is {found!a:.40}, not a list of names (TypeError)", fix="write [] there"
        )


def _check_scheme(scheme: object, release: Release) -> None:
    if isinstance(scheme, dict) and not release.is_strict_scheme:
        # One of the two is enough: a cache of INT8 is then served as one of FP8.
        has_one = scheme.get("type") == "float" or scheme.get("num_bits") == _BITS
        scheme = {**scheme, "type": "float", "num_bits": _BITS} if has_one else scheme
    strategy = scheme.get("strategy") if isinstance(scheme, dict) else None
    fault = find_scheme_fault(scheme)
    if not fault and strategy is not None and strategy not in release.strategies:
        fault = f"kv_cache_scheme.strategy is {strategy!a:.40}, which {release.title} does not have"
    if not fault:
        return
    if not isinstance(scheme, dict):
        raise Refusal(fault, fix="write the scheme of kv-overlay")
    fix = SCHEME_HINT if len(release.strategies) > 1 else "store one scale per layer (kv-overlay)"
    raise Refusal(f"{fault}: NotImplementedError at start", fix=fix)


def _check_fp8(quantization: Mapping[str, object]) -> KvMethod:
    scheme = quantization.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        why = f"activation_scheme is {scheme!a:.40}, and quant_method fp8 needs static or dynamic"
        raise Refusal(why, fix="name one; where only the KV cache is quantized, write a kv-overlay")
    if quantization.get("weight_block_size") is not None and scheme != "dynamic":
        why = "weight_block_size with static activations is a ValueError"
        raise Refusal(why, fix="blocks need activation_scheme dynamic")
    return KvMethod.FP8


def _check_quark(quantization: Mapping[str, object]) -> KvMethod:
    export = quantization.get("export")
    if not isinstance(export, dict) or not isinstance(export.get("kv_cache_group"), list):
        raise Refusal("a Quark config needs export.kv_cache_group", fix="export with Quark 0.13")
    if not isinstance(quantization.get("exclude"), list):
        raise Refusal("a Quark config needs the list exclude (TypeError)", fix="write [] there")
    group = [pattern for pattern in export["kv_cache_group"] if isinstance(pattern, str)]
    if group:
        _check_quark_outputs(quantization.get("layer_quant_config"), group)
    return KvMethod.QUARK


def _check_quark_outputs(layers: object, group: list[str]) -> None:
    found = [
        config.get("output_tensors")
        for name, config in (layers if isinstance(layers, dict) else {}).items()
        if isinstance(config, dict) and any(fnmatch.fnmatchcase(name, item) for item in group)
    ]
    if not found or any(tensors != found[0] for tensors in found):
        why = "layer_quant_config has not the same output_tensors for all of export.kv_cache_group"
        raise Refusal(why, fix="quantize k_proj and v_proj alike")
    tensors = found[0] if isinstance(found[0], dict) else {}
    if (tensors.get("dtype"), tensors.get("qscheme")) != ("fp8_e4m3", "per_tensor"):
        why = "Quark's KV scales must be fp8_e4m3 and per_tensor: NotImplementedError at start"
        raise Refusal(why, fix="quantize the cache per tensor")
