"""What vLLM 0.32.0 makes of a `quantization_config`: a KV method, none, or a refusal to start.

Sources: `transformers_utils/config.py`, `config/model.py` (`_verify_quantization`) and
`model_executor/layers/quantization/` (`fp8.py`, `compressed_tensors/`, `modelopt.py`,
`quark/quark.py`).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from enum import StrEnum

from fp8calib.dialects.check_files import ScaleFolder
from fp8calib.dialects.check_report import Refusal

KvMethod = StrEnum("KvMethod", ["COMPRESSED_TENSORS", "FP8", "MODELOPT", "QUARK", "NONE"])

_DEPRECATED = ("fbgemm_fp8", "fp_quant")
_WITHOUT_KV = (
    "awq",
    "auto_awq",
    "auto_gptq",
    "gptq",
    "gptq_marlin",
    "awq_marlin",
    "humming",
    "experts_int8",
    "moe_wna16",
    "torchao",
    "inc",
    "mxfp4",
    "gpt_oss_mxfp4",
    "deepseek_v4_fp8",
)
"""Methods without a place for KV scales: stray ones are ignored."""
MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "NVFP4",
    "W4A16_NVFP4",
    "MXFP8",
    "MIXED_PRECISION",
)
_STRATEGIES = ("tensor", "attn_head")


def find_quantization(folder: ScaleFolder, *, keys: tuple[str, ...]) -> Mapping[str, object] | None:
    """Find the quantization config of a folder, where engines look for it, in their order.

    Args:
        folder: the checkpoint.
        keys: `modelopt` for `hf_quant_config.json`, else keys of config.json; `text_config.KEY`
            names one of the text part.

    Raises:
        Refusal: it is not an object.
    """
    for key in keys:
        found = folder.modelopt if key == "modelopt" else _look_up(folder.config, key)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise Refusal(f"{key} is not an object", mend="write it as a JSON object")
        return found
    return None


def _look_up(config: Mapping[str, object], key: str) -> object:
    outer, _, inner = key.rpartition(".")
    section = config.get(outer) if outer else config
    return section.get(inner) if isinstance(section, Mapping) else None


def find_kv_method(quantization: Mapping[str, object]) -> KvMethod:
    """Find the method that holds KV scales, having checked what vLLM checks.

    Raises:
        Refusal: vLLM does not start with this config.
    """
    method = quantization.get("quant_method")
    if not isinstance(method, str):
        raise Refusal("quantization_config has no quant_method", mend="name the method there")
    if method in _DEPRECATED:
        why = f"quant_method {method} is refused without --allow-deprecated-quantization"
        raise Refusal(why, mend="quantize with compressed-tensors instead")
    if method.lower().startswith("modelopt"):
        return _check_modelopt(quantization)
    if method == "compressed-tensors":
        _check_scheme(quantization.get("kv_cache_scheme"))
        return KvMethod.COMPRESSED_TENSORS
    if method == "fp8":
        return _check_fp8(quantization)
    if method == "quark":
        return _check_quark(quantization)
    if method in _WITHOUT_KV:
        return KvMethod.NONE
    raise Refusal(f"quant_method {method!a:.60} is unknown to vLLM 0.32", mend="correct the name")


def _check_modelopt(quantization: Mapping[str, object]) -> KvMethod:
    section = quantization.get("quantization", quantization)
    algorithm = section.get("quant_algo") if isinstance(section, dict) else None
    if not algorithm:
        why = "a ModelOpt config without quant_algo is refused, KV cache alone is no scheme there"
        mend = "write the scales in compressed-tensors' form (kv-overlay)"
        raise Refusal(f"Missing 'quant_algo' in quantization config: {why}", mend=mend)
    if str(algorithm).upper() not in MODELOPT_ALGORITHMS:
        why = f"quant_algo {algorithm!a:.60} is unknown to vLLM 0.32"
        raise Refusal(why, mend=f"it knows {', '.join(MODELOPT_ALGORITHMS)}")
    return KvMethod.MODELOPT


def _check_scheme(scheme: object) -> None:
    if scheme is None:
        return
    if not isinstance(scheme, dict):
        raise Refusal("kv_cache_scheme is not an object", mend="write the scheme of kv-overlay")
    faults = {
        "type": scheme.get("type") != "float",
        "num_bits": scheme.get("num_bits") != 8,
        "strategy": scheme.get("strategy") not in _STRATEGIES,
        "symmetric": not scheme.get("symmetric"),
    }
    for key, is_wrong in faults.items():
        if is_wrong:
            why = f"kv_cache_scheme.{key} is {scheme.get(key)!a:.40}: NotImplementedError at start"
            mend = "symmetric float of 8 bits, strategy tensor or attn_head"
            raise Refusal(why, mend=mend)


def _check_fp8(quantization: Mapping[str, object]) -> KvMethod:
    scheme = quantization.get("activation_scheme")
    if scheme not in ("static", "dynamic"):
        why = f"activation_scheme is {scheme!a:.40}, and quant_method fp8 wants static or dynamic"
        raise Refusal(why, mend="say which; weights alone in 16 bits want kv-overlay")
    return KvMethod.FP8


def _check_quark(quantization: Mapping[str, object]) -> KvMethod:
    export = quantization.get("export")
    if not isinstance(export, dict) or not isinstance(export.get("kv_cache_group"), list):
        raise Refusal("a Quark config needs export.kv_cache_group", mend="export with Quark 0.13")
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
        why = "layer_quant_config has no one output_tensors for all of export.kv_cache_group"
        raise Refusal(why, mend="quantize k_proj and v_proj alike")
    tensors = found[0] if isinstance(found[0], dict) else {}
    if (tensors.get("dtype"), tensors.get("qscheme")) != ("fp8_e4m3", "per_tensor"):
        why = "Quark's KV scales must be fp8_e4m3 and per_tensor: NotImplementedError at start"
        raise Refusal(why, mend="quantize the cache per tensor")
