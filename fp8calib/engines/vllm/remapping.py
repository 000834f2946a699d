"""How vLLM before 0.25 maps the names of scales: in the loader of each model.

Sources: `model_loader/weight_utils.py` (maybe_remap_kv_scale_name, run in each release), and calls
of it and of get_cache_scale in `models/` (read).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from fp8calib.engines.vllm.releases import Release

_NOT_BEFORE_0_25 = (
    "bamba bloom deepseek_v4 falcon flex_olmo gemma gpt2 gpt_bigcode gpt_neox granitemoehybrid "
    "hrm_text jamba lfm2 lfm2_moe longcat_flash minicpm3 minimax mpt olmo olmo2 olmo3 olmo_hybrid "
    "olmoe opt persimmon phi qwen2_moe stablelm step3p5 zamba2"
)
OWN_MAPPING: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(_NOT_BEFORE_0_25.split(), (0, 25)),
    "falcon_h1": (0, 16),
    "gpt_oss": (0, 17),
    "qwen3_next": (0, 14),
}
"""The first release whose loader of a model type maps the names of scales; (0, 0) for others."""
_WITHOUT_OUTPUTS = (
    *("afmoe", "axk1", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots1", "ernie4_5_moe"),
    *("falcon_h1", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "minimax_m2"),
    *("nemotron_h", "qwen3_next", "starcoder2"),
)
"""Model types whose loader maps scales, but not those that Quark names output_scale."""
_OUTPUTS_SINCE: Mapping[str, tuple[int, int]] = {"granitemoehybrid": (0, 11), "qwen3_moe": (0, 13)}
"""The first release whose loader does, where it is later; granitemoehybrid maps only those."""

_PATTERNS = (
    (re.compile(r"\.self_attn\.[kv]_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale", ""),
    (re.compile(r"\.self_attn\.qk(?:qk)?v_proj\.([kv])_scale$"), r".self_attn.attn.\1_scale", ""),
    (
        re.compile(r"\.mixer\.[kv]_proj\.([kv])_scale$"),
        r".mixer.attn.\1_scale",
        "mixer.k_proj.k_scale",
    ),
    (re.compile(r"\.self_attn\.q\.scale$"), ".self_attn.attn.q_scale", "q.scale"),
    (
        re.compile(r"\.self_attn\.([kv])_cache\.scale$"),
        r".self_attn.attn.\1_scale",
        "k_cache.scale",
    ),
    (re.compile(r"\.q_scale$"), ".attn.q_scale", "q_scale"),
    (re.compile(r"\.([kv])_scale$"), r".attn.\1_scale", ""),
    (re.compile(r"\.([qkv])_zero_point$"), r".attn.\1_zero_point", "q_zero_point"),
)
"""Only the first that matches is used. The last entry is the name of `Release.remapped_names`
without which a pattern does not exist yet."""


def find_remapped(name: str, release: Release) -> str | None:
    """Find the parameter that a name is mapped to, which is skipped where the model has none.

    Returns:
        The parameter; None for a name that is left as it is.
    """
    if name.endswith(".kv_scale"):
        return name.replace(".kv_scale", ".attn.k_scale")
    for pattern, new, needs in _PATTERNS:
        if pattern.search(name) and (not needs or needs in release.remapped_names):
            return pattern.sub(new, name)
    return None


def maps_own_outputs(model_type: str, release: Release) -> bool:
    """Check whether the loader of a model type maps Quark's names."""
    if model_type in _OUTPUTS_SINCE:
        return release.minor >= _OUTPUTS_SINCE[model_type]
    maps = release.minor >= OWN_MAPPING.get(model_type, (0, 0))
    return maps and model_type not in _WITHOUT_OUTPUTS
