"""The names of scales that vLLM's weight loader loads, ignores or refuses, by model type.

`OUTCOMES` is what the loader of vLLM 0.32.0 did on a CPU with one tensor of each name, in a tiny
model of each type. `tests/real_engines/test_vllm_names.py` runs some of them again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import pytest

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.facts.release import VLLM_RUN
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.load_context import LoadContext
from fp8calib.engines.vllm.kv_method import KvMethod
from fp8calib.engines.vllm.names import WeightLoader, is_placeless
from tests.formats.handmade import make_attention, make_geometry

PATH = "model.layers.0.self_attn"
WRAPPED = "language_model.model.layers.0.self_attn"
INNER = "model.language_model.layers.0.self_attn"
IN_ATTENTION = (
    *("k_scale", "kv_scale", "q_scale", "k_proj.k_scale", "k_proj.output_scale"),
    *("k_proj.k_zero_point", "k_zero_point", "k_cache.scale", "q.scale", "attn.k_scale"),
    *("attn.kv_scale", "attn.attn.k_scale", "prob_scale", "prob_output_scale", "attn.prob_scale"),
    *("K_scale", "key_scale", "_k_scale", "k_cache_scale", "k_scales", "nothing.k_scale"),
)
ELSEWHERE = (
    "mtp.layers.0.self_attn.k_scale",
    "lm_head.k_scale",
    "visual.blocks.0.attn.k_scale",
    "k_scale",
)
METHODS = (KvMethod.COMPRESSED_TENSORS, KvMethod.FP8, None)

OUTCOMES: Mapping[tuple[str, str, str], tuple[str, ...]] = {
    ("LLLLEELLLLEEEEEEEEEEEEEEEEE", "LLLLEEILLLEEELLEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("apertus", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3_text", "nemotron"),
        *("olmoe", "qwen2_moe", "stablelm"),
    ),
    ("LLLLEELLLLEEEEEEEEEEELEEEEE", "LLLLEEILLLEEELLEEEEEELEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("arcee", "biogpt", "dots1", "glm", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe"),
        *("ministral", "nanochat", "olmo", "olmo2", "olmo3", "opt", "phi", "phimoe"),
        *("seed_oss", "smollm3", "starcoder2"),
    ),
    ("LLLEEELEELEEEEEEEEEEELEEEEE", "LLLELEEEELEEEELEEEEEELEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("bloom", "falcon"),
    ),
    ("LLLLEELLLLEEEEEEEEEEEEEEIEE", "LLLLEEILLLEEELLEEEEEEEEEIEE", "EEEEEEEEEEEEEEEEEEEEEEEEIEE"): (
        *("cohere", "cohere2"),
    ),
    ("IIIIEIIIIIIIEEEEEEEEIEIEEEE", "IIIIIIIIIIIIEEEEEEEEIEIEEEE", "IIIIEIIIIIIIEEEEEEEEIEIEEEE"): (
        *("deepseek_v2", "deepseek_v3", "glm4_moe_lite"),
    ),
    ("LLLLEELLLLEEEEEEEEEEEEEEEEE", "LLLLLEILLLEEELLEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("ernie4_5", "gemma3n_text", "gemma4_text", "glm4", "granite", "granitemoe"),
        *("llama", "mixtral", "phi3", "qwen2", "qwen3", "qwen3_moe", "vl_cohere2_vision"),
        *("vl_idefics3", "vl_qwen2_vl", "vl_qwen3_vl"),
    ),
    ("LLLLEELLLLEEEEEEEEEEEEEEEEE", "LLLLLEELLLEEELLEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("ernie4_5_moe", "glm4_moe", "llama4_text"),
    ),
    ("ELEEEEEEELEEEEEEEEEEEEEEEEE", "ELEELEEEELEEEELEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("gpt2",),
    ),
    ("ILIEEEIEELEEEEEEEEEEEIEEEEE", "ILIELEIEELEEEELEEEEEEIEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("gpt_bigcode",),
    ),
    ("LLLEEELEELEEEEEEEEEEELEEEEE", "LLLELEIEELEEEELEEEEEELEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("gpt_neox",),
    ),
    ("ILIEEEIEELEEEEEEEEEEEIEEEEE", "ILIEEEIEELEEEELEEEEEEIEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("gptj",),
    ),
    ("EEEEEEEEEEEEEEEEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("jamba", "lfm2_moe"),
    ),
    ("LLLLEELLLLEEEEEEEEEEELEEEEE", "LLLLLEILLLEEELLEEEEEELEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("mistral", "persimmon", "vl_gemma3", "vl_internvl", "vl_llava-gemma"),
        *("vl_llava-qwen3", "vl_paligemma"),
    ),
    ("LLLLEELEELEEEEEEEEEEELEIEEE", "LLLLEEIEELEEEELEEEEEELEIEEE", "EEEEEEEEEEEEEEEEEEEEEEEIEEE"): (
        *("nemotron_h",),
    ),
    ("LLLLEELLLLEEEEEEEEEEEEEIEEE", "LLLLLEILLLEEELLEEEEEEEEIEEE", "EEEEEEEEEEEEEEEEEEEEEEEIEEE"): (
        *("qwen3_5_text",),
    ),
    ("LLLLEELLLLEEEEEEEEEEEEEIEEE", "LLLLLEELLLEEELLEEEEEEEEIEEE", "EEEEEEEEEEEEEEEEEEEEEEEIEEE"): (
        *("qwen3_next",),
    ),
    ("LLLLEELLLLEEEEEEEEEEELEEEEE", "LLLLLEELLLEEELLEEEEEELEEEEE", "EEEEEEEEEEEEEEEEEEEEEEEEEEE"): (
        *("vl_llama4",),
    ),
}
"""By outcomes (loaded, ignored, error) under each of METHODS, for each of IN_ATTENTION, the first
name without its root, one of a layer that does not exist, and each of ELSEWHERE."""
PLACES: Mapping[str, tuple[str, str, bool, str]] = {
    "biogpt": ("biogpt", "biogpt.layers.0.self_attn", True, ""),
    "bloom": ("bloom", "transformer.h.0.self_attention", False, ""),
    "deepseek_v2": ("deepseek_v2", PATH, False, ""),
    "deepseek_v3": ("deepseek_v3", PATH, False, ""),
    "falcon": ("falcon", "transformer.h.0.self_attention", False, ""),
    "glm4_moe_lite": ("glm4_moe_lite", PATH, False, ""),
    "gpt2": ("gpt2", "transformer.h.0.attn", False, ""),
    "gpt_bigcode": ("gpt_bigcode", "transformer.h.0.attn", False, ""),
    "gpt_neox": ("gpt_neox", "gpt_neox.layers.0.attention", False, ""),
    "gptj": ("gptj", "transformer.h.0.attn", True, ""),
    "jamba": ("jamba", "model.layers.1.self_attn", True, ""),
    "lfm2_moe": ("lfm2_moe", "model.layers.1.self_attn", True, ""),
    "nemotron_h": ("nemotron_h", "backbone.layers.1.mixer", True, ""),
    "opt": ("opt", "model.decoder.layers.0.self_attn", True, ""),
    "persimmon": ("persimmon", PATH, False, ""),
    "phi3": ("phi3", PATH, False, ""),
    "qwen3_5_text": ("qwen3_5_text", "model.layers.1.self_attn", True, ""),
    "qwen3_next": ("qwen3_next", "model.layers.1.self_attn", True, ""),
    "vl_cohere2_vision": ("cohere2", INNER, True, "Cohere2Vision"),
    "vl_gemma3": ("gemma3_text", WRAPPED, True, "Gemma3"),
    "vl_idefics3": ("llama", "model.text_model.layers.0.self_attn", True, "Idefics3"),
    "vl_internvl": ("qwen2", WRAPPED, True, "InternVL"),
    "vl_llama4": ("llama4_text", WRAPPED, True, "Llama4"),
    "vl_llava-gemma": ("gemma", WRAPPED, True, "Llava"),
    "vl_llava-qwen3": ("qwen3", WRAPPED, True, "Llava"),
    "vl_paligemma": ("gemma2", WRAPPED, True, "PaliGemma"),
    "vl_qwen2_vl": ("qwen2_vl_text", "model.layers.0.self_attn", True, "Qwen2VL"),
    "vl_qwen3_vl": ("qwen3_vl_text", INNER, True, "Qwen3VL"),
}
"""Where a model differs from llama: its type, the path of its attention, whether that has a k_proj,
and the beginning of the class that wraps it."""


LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite")


def _make(family: str, method: KvMethod | None) -> tuple[WeightLoader, str]:
    model_type, path, has_projection, architecture = PLACES.get(family, (family, PATH, True, ""))
    kind = "latent" if family in LATENT else "heads"
    attention = make_attention(0, module=path, checkpoint_module=path, kind=kind)
    wrapper = f"{architecture}ForConditionalGeneration" if architecture else "Handmade"
    geometry = make_geometry([attention], model_type=model_type, architecture=wrapper)
    stored = [f"{path}.{'k_proj' if has_projection else 'query_key_value'}.weight"]
    tensors = {name: TensorEntry(dtype="BF16", shape=(8, 8), start=0, stop=128) for name in stored}
    folder = ScaleFolder(path=Path(), config={}, tensors={"m": tensors}, scales={"m": {}})
    has_places = kind == "heads" and method and not is_placeless(geometry, VLLM_RUN)
    places = {f"{path}.attn": 0} if has_places else {}
    return WeightLoader(LoadContext(folder, geometry, ["m"]), method, places, VLLM_RUN), path


def _list_names(path: str) -> Iterable[str]:
    yield from (f"{path}.{suffix}" for suffix in IN_ATTENTION)
    yield f"{path.removeprefix('model.')}.k_scale"
    yield f"{re.sub('[0-9]', '5', path, count=1)}.k_scale"
    yield from ELSEWHERE


@pytest.mark.parametrize(
    ("family", "outcomes"), [(name, row) for row, names in OUTCOMES.items() for name in names]
)
def test_a_name_is_loaded_ignored_or_refused_as_in_vllm(
    family: str, outcomes: tuple[str, str, str]
) -> None:
    for method, expected in zip(METHODS, outcomes, strict=True):
        loader, path = _make(family, method)
        names = [*_list_names(path)]
        found = ["E" if loader.find_fault(name) else "-" for name in names]
        wanted = ["E" if outcome == "E" else "-" for outcome in expected]
        assert dict(zip(names, found, strict=True)) == dict(zip(names, wanted, strict=True))
        loads_k = [name for name, outcome in zip(names, expected, strict=True) if outcome == "L"]
        keys = [name for name in loads_k if ".q" not in name and "prob" not in name]
        assert all(loader.find_slot(name) for name in keys if "zero_point" not in name)
