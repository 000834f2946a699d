"""How the models of SGLang load KV scales, by model type (`srt/models/`).

Most of it is facts. The tables are those of 0.5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.facts.release import Release
from fp8calib.model.shapes import ModelGeometry

CLASS = "class"
"""Without a class SGLang runs transformers' code, whose attention has no parameters of its own
(`models/transformers.py`)."""
_PLAIN_FACT = "loaders of qwen3_5 map self_attn.k_scale"
_PLACELESS = "attention of this model type has no parameters for KV scales"
_READS_FILE = "class of this model type reads a file of scales"
MAPS_NAMES = "loader of this model type maps the names of KV scales (maybe_remap_kv_scale_name)"
"""Its attention gets a folder's `k_scale`."""
IS_STRICT = "loader of this model type raises an error for a name without a parameter"
INDEXES = "loader of this model type raises a KeyError for a name that it does not map"
"""Such as q_scale."""
FUSES_FIRST = "loader of this model type renames k_proj before its scale"
"""It raises a KeyError for a scale under a projection, which it looks for in qkv_proj (the names of
ModelOpt and Quark)."""
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
LOSING_TYPES = ("llama4",)
"""Model types that rename every KV scale but then do not load it (`mllama4.py`,
`_handle_scale_remapping`): 1.0."""
_WRAPPERS = {
    "Gemma3nForConditionalGeneration": "gemma3n",
    "GlmAsrForConditionalGeneration": "glmasr",
    "InternS1ForConditionalGeneration": "interns1",
    "Llama4ForConditionalGeneration": "llama4",
    "Qwen2AudioForConditionalGeneration": "qwen2_audio",
}
"""Multimodal classes that load the text model's weights themselves; the others pass them on, or do
as the tables say for the type of the text model."""


def find_sglang_type(geometry: ModelGeometry) -> str:
    """Find the model type under which these tables list how SGLang loads the weights."""
    return _WRAPPERS.get(geometry.architecture, geometry.model_type)


def has_class(architecture: str, release: Release) -> bool:
    """Tell whether a release is not older than a model's class."""
    is_later = bool(release.begins[CLASS].get(architecture))
    return not is_later or architecture in release.list_values(CLASS)


def find_own_names(model_type: str, release: Release) -> Mapping[str, str]:
    """Give the mapping of a model's own loader; empty where it has none."""
    names = _OWN_MAPPINGS.get(model_type, {})
    is_early = not release.has(_PLAIN_FACT)
    return {old: new for old, new in names.items() if not (is_early and old in _PLAIN_NAMES)}


def has_place(model_type: str, release: Release) -> bool:
    """Tell whether the attention of a model type has parameters for KV scales."""
    return model_type not in release.list_values(_PLACELESS)


def takes_sglang_json(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether SGLang's class reads a file of scales; multimodal classes do not."""
    if not has_class(geometry.architecture, release):
        return False
    is_wrapped = geometry.is_wrapped and geometry.model_type != "glm5_next"
    return geometry.model_type in release.list_values(_READS_FILE) and not is_wrapped
