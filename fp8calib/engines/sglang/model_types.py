"""How the models of SGLang load KV scales, by model type (`srt/models/`).

The tables are those of 0.5.23; what differs in older releases is a fact.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.facts.release import Release
from fp8calib.geometry.model_geometry import ModelGeometry

CLASS = "class"
"""Without a class SGLang runs transformers' code, whose attention has no parameters of its own
(`models/transformers.py`)."""
_LISTS_PARTS = "class says which projections it joins (packed_modules_mapping)"
"""In other classes a list of modules has to name the joined one, `qkv_proj`."""
_PLAIN_FACT = "loaders of qwen3_5 map self_attn.k_scale"
_KV_PLACE = "attention of this model type has parameters for KV scales"
_FUSES_FIRST = "loader of this model type renames k_proj before its scale"
JSON_TYPES = (
    *("llama", "qwen2", "qwen3", "mimo", "mimo_v2", "mimo_v2_flash", "opt", "glm4", "glm5_next"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4", "arcee", "apertus", "internlm3"),
    *("iquestcoder", "ministral3", "mistral", "phi3"),
)
"""Model types whose classes have `load_kv_cache_scales` (SGLang 0.5.23 `srt/models/`); the last
five are subclasses of llama's. llama4's class inherits it too, but its inner model does not."""
TYPES_WITHOUT_KV_SCALES = frozenset(
    {
        *("exaone_moe", "falcon_h1", "glm4_moe", "glm4v_moe_text", "gpt_oss", "hunyuan_v1_dense"),
        *(
            "hunyuan_v1_moe",
            "hy_v3",
            "lfm2",
            "lfm2_moe",
            "llama4_text",
            "mellum",
            "muse_spark_text",
        ),
        *("qwen3", "qwen3_moe", "qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text"),
        *("stablelm", "step3p5"),
    }
)
"""Model types whose class creates `RadixAttention` without a `quant_config` (SGLang 0.5.23
`srt/models/`; in stablelm the layer does not pass it on): it has no parameter for a scale."""
MAPPING_TYPES = frozenset(
    {
        *("apertus", "arcee", "cohere", "cohere2", "dbrx", "diffusion_gemma", "exaone4", "gemma2"),
        *("gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gptj"),
        *("hunyuan_v1_dense", "hunyuan_v1_moe", "internlm3", "iquestcoder", "kimi_linear"),
        *("llama", "llama4_text", "minimax_m2", "ministral3", "mistral", "muse_glimmer"),
        *("nemotron_h", "phi3", "phimoe", "qwen3", "solar"),
    }
)
"""Model types whose `load_weights` calls `maybe_remap_kv_scale_name` (SGLang 0.5.23): their
attention gets a folder's `k_scale`."""
_MODELOPT_NAMES = {f".{role}_proj.{role}_scale": f".attn.{role}_scale" for role in "kv"}
_LATENT_NAMES = {f".{role}_proj.{role}_scale": f".attn_mqa.{role}_scale" for role in "kv"}
_PLAIN_NAMES = {f".self_attn.{role}_scale": f".self_attn.attn.{role}_scale" for role in "kv"}
_OWN_MAPPINGS: Mapping[str, Mapping[str, str]] = {
    "qwen3_next": _MODELOPT_NAMES,
    "qwen3_5_text": {**_MODELOPT_NAMES, **_PLAIN_NAMES},
    "qwen3_5_moe_text": {**_MODELOPT_NAMES, **_PLAIN_NAMES},
    "deepseek_v2": _LATENT_NAMES,
    "deepseek_v3": _LATENT_NAMES,
    "deepseek_v32": _LATENT_NAMES,
    "glm_moe_dsa": _LATENT_NAMES,
}
"""The mappings that loaders of other model types contain: ends of names, and what replaces them
(`models/qwen3_next.py`, `models/qwen3_5.py`, `deepseek_common/deepseek_weight_loader.py`)."""
STRICT_TYPES = frozenset(
    {
        *("ernie4_5_moe", "falcon_h1", "gemma", "gpt2", "gpt_bigcode", "granite", "granite_swa"),
        *("glmasr", "granitemoehybrid", "interns1", "minicpm3", "mllama_text_model", "olmo"),
        *("olmo2", "olmoe", "qwen2_audio", "qwen2_vl_text", "qwen3_next", "stablelm"),
    }
)
"""Model types whose `load_weights` raises an error for a name without a parameter."""
INDEXING_TYPES = frozenset(
    {
        *("cohere", "cohere2", "gemma2", "gemma3_text", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        "phimoe",
    }
)
"""Model types among those that map names whose `load_weights` raises a KeyError for a name that the
mapping does not change, such as q_scale (run, name by name)."""
FUSING_TYPES = frozenset(
    {
        *("cohere", "cohere2", "gemma2", "gemma3n", "gptj", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("mixtral", "opt", "phimoe", "qwen2_5_vl_text", "starcoder2"),
    }
)
"""Model types that first rename k_proj to qkv_proj, and then raise a KeyError for a scale under a
projection (the names of ModelOpt and Quark)."""
LOSING_TYPES = ("llama4",)
"""Model types that rename every KV scale but then do not load it (`mllama4.py`,
`_handle_scale_remapping`): 1.0."""
_JOINED = ("qkv_proj", "gate_up_proj")
_LISTING_ONE: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("BaiChuanBaseForCausalLM", "BaichuanForCausalLM", "BailingMoELinearForCausalLM"),
            *("BailingMoeV2_5ForCausalLM", "HYV4ForCausalLM", "Qwen2_5_VLForConditionalGeneration"),
        ),
        "gate_up_proj",
    ),
    **dict.fromkeys(
        (
            *("GraniteMoeHybridForCausalLM", "NemotronHForCausalLM", "NemotronHPuzzleForCausalLM"),
            "PhiForCausalLM",
        ),
        "qkv_proj",
    ),
}
"""Classes that say it of one of them."""
_WRAPPERS = {
    "Gemma3nForConditionalGeneration": "gemma3n",
    "GlmAsrForConditionalGeneration": "glmasr",
    "InternS1ForConditionalGeneration": "interns1",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
}
"""Multimodal classes that load the text model's weights themselves; the others pass them on, or do
as the tables say for the type of the text model."""
_WRAPPED = "ForConditionalGeneration"


def find_sglang_type(geometry: ModelGeometry) -> str:
    """Find the model type under which these tables list how SGLang loads the weights."""
    return _WRAPPERS.get(geometry.architecture, geometry.model_type)


def has_class(architecture: str, release: Release) -> bool:
    """Tell whether a release is not older than a model's class."""
    is_later = bool(release.begins[CLASS].get(architecture))
    return not is_later or architecture in release.list_values(CLASS)


def find_unlisted(architecture: str, release: Release) -> frozenset[str]:
    """Find what a model's class joins without saying of which projections."""
    if architecture not in release.list_values(_LISTS_PARTS):
        return frozenset(_JOINED)
    return frozenset(_JOINED) - {_LISTING_ONE.get(architecture, name) for name in _JOINED}


def find_own_names(model_type: str, release: Release) -> Mapping[str, str]:
    """Give the mapping of a model's own loader; empty where it has none."""
    names = _OWN_MAPPINGS.get(model_type, {})
    is_early = not release.has(_PLAIN_FACT)
    return {old: new for old, new in names.items() if not (is_early and old in _PLAIN_NAMES)}


def has_place(model_type: str, release: Release) -> bool:
    """Tell whether the attention of a model type has parameters for KV scales."""
    is_dated = model_type in release.begins[_KV_PLACE]
    is_late = is_dated and model_type not in release.list_values(_KV_PLACE)
    return model_type not in TYPES_WITHOUT_KV_SCALES and not is_late


def fuses_first(model_type: str, release: Release) -> bool:
    """Tell whether a scale under a projection is an error, because it is looked for in qkv_proj."""
    return model_type in FUSING_TYPES or model_type in release.list_values(_FUSES_FIRST)


def takes_sglang_json(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether SGLang's class reads a file of scales; multimodal classes do not."""
    if not has_class(geometry.architecture, release):
        return False
    is_wrapped = geometry.architecture.endswith(_WRAPPED) and geometry.model_type != "glm5_next"
    return geometry.model_type in JSON_TYPES and not is_wrapped
