"""How vLLM 0.32.0 maps names of scales to parameters, and which names stop its loader.

Sources: `quantization/base_config.py` (`get_cache_scale_mapper`), `models/utils.py`
(`AutoWeightsLoader`) and the models' own `load_weights`.
"""

from __future__ import annotations

import re

from fp8calib.dialects.kv.overlay import VLLM_STRICT_TYPES
from fp8calib.engines.replay.folder import LoadContext
from fp8calib.engines.replay.verdicts import Refusal
from fp8calib.engines.vllm.model_types import TYPES_WITHOUT_KV_SCALES
from fp8calib.engines.vllm.quantization_config import KvMethod

NAMES_FIX = "name it as kv-overlay does: the attention module's path, then .k_scale or .v_scale"
_REGEXES = (
    (re.compile(r"\.kv_scale$"), ".attn.k_scale"),
    (re.compile(r"\.self_attn\.[kv]_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"\.mixer\.[kv]_proj\.([kv])_scale$"), r".mixer.attn.\1_scale"),
    (re.compile(r"\.self_attn\.q\.scale$"), ".self_attn.attn.q_scale"),
    (re.compile(r"\.self_attn\.([kv])_cache\.scale$"), r".self_attn.attn.\1_scale"),
    (re.compile(r"(?<!\.attn)\.([qkv])_scale$"), r".attn.\1_scale"),
    (re.compile(r"(?<!\.attn)\.([qkv])_zero_point$"), r".attn.\1_zero_point"),
)
"""`QuantizationConfig.get_cache_scale_mapper`, in its order, applied one after another."""
_OUTPUTS = {
    **{f".{role}_proj.output_scale": f".attn.{role}_scale" for role in ("q", "k", "v")},
    ".self_attn.prob_output_scale": ".self_attn.attn.prob_scale",
}
"""What fp8 and quark map in addition."""
_OF_PROBABILITIES = (KvMethod.FP8, KvMethod.MODELOPT, KvMethod.QUARK)
"""Methods whose layers hold a prob_scale."""
_IGNORED = tuple(f".{role}_{kind}" for role in ("q", "k", "v") for kind in ("scale", "zero_point"))
"""`_ignore_unexpected_suffixes`: names that need no parameter."""


def name_vllm_parameter(name: str, method: KvMethod) -> str:
    """Give the name of the parameter that vLLM looks for, given the name of a tensor."""
    for pattern, new in _REGEXES:
        name = pattern.sub(new, name)
    if method in (KvMethod.FP8, KvMethod.QUARK):
        for suffix, new in _OUTPUTS.items():
            if name.endswith(suffix):
                name = name.removesuffix(suffix) + new
    return name


def refuse_unmapped(context: LoadContext, method: KvMethod) -> None:
    """Refuse a folder where the name of a scale stops the loader.

    Raises:
        Refusal: naming the scale.
    """
    modules = [attention.checkpoint_module for _, attention in context.geometry.attentions()]
    for name, scale in context.scales.items():
        if why := _find_fault(
            context.geometry.model_type, modules, name_vllm_parameter(name, method), method
        ):
            raise Refusal(f"{scale}: {why}", fix=_find_fix(context.geometry.model_type))


def _find_fault(model_type: str, modules: list[str], mapped: str, method: KvMethod) -> str:
    """Say why the loader fails on a name; empty where it loads or ignores it."""
    if model_type in TYPES_WITHOUT_KV_SCALES:
        return f"vLLM's attention of {model_type} has no parameters for scales (ValueError)"
    stored = {f"{module}.attn.prob_scale" for module in modules}
    if not mapped.endswith(_IGNORED) and not (method in _OF_PROBABILITIES and mapped in stored):
        return "this quant_method maps it to no parameter, and the loader fails on it"
    inner = {f"{module}.attn." for module in modules}
    if model_type in VLLM_STRICT_TYPES and mapped[: mapped.rfind(".") + 1] not in inner:
        return f"vLLM's {model_type} has no such parameter (ValueError)"
    return ""


def _find_fix(model_type: str) -> str:
    if model_type in TYPES_WITHOUT_KV_SCALES:
        return "serve the model without scales: --kv-cache-dtype fp8 then multiplies by 1.0"
    if model_type in VLLM_STRICT_TYPES:
        return "name it .attn.attn.k_scale: vLLM's attention layer is inside .attn"
    return NAMES_FIX
