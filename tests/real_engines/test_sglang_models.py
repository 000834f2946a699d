"""What `check` says of a scale's name is what the model's own loader in SGLang does with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from fp8calib.engines.replay.verdicts import EngineReport
from tests.engines.check_handmade import (
    FP8,
    ask,
    moved_geometry,
    plain_geometry,
    save_folder,
    spell,
)
from tests.real_engines.sglang_attention import gives_scales_a_place
from tests.real_engines.sglang_models import load

MODELS = {
    "cohere": "CohereForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "ernie4_5_moe": "Ernie4_5_MoeForCausalLM",
    "exaone4": "Exaone4ForCausalLM",
    "falcon_h1": "FalconH1ForCausalLM",
    "gemma": "GemmaForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma3n_text": "Gemma3nForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "glm4": "Glm4ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "granite": "GraniteForCausalLM",
    "granitemoehybrid": "GraniteMoeHybridForCausalLM",
    "hunyuan_v1_dense": "HunYuanDenseV1ForCausalLM",
    "hunyuan_v1_moe": "HunYuanMoEV1ForCausalLM",
    "lfm2": "Lfm2ForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "minicpm3": "MiniCPM3ForCausalLM",
    "minimax_m2": "MiniMaxM2ForCausalLM",
    "mistral": "MistralForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmo": "OlmoForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "opt": "OPTForCausalLM",
    "persimmon": "PersimmonForCausalLM",
    "phi": "PhiForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "phimoe": "PhiMoEForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "stablelm": "StableLmForCausalLM",
    "starcoder2": "Starcoder2ForCausalLM",
}
"""Model types, and the class that SGLang has for them; their attention is called self_attn."""
OTHERS = {
    "arcee": "ArceeForCausalLM",
    "dbrx": "DbrxForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "exaone_moe": "ExaoneMoEForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "gptj": "GPTJForCausalLM",
    "hy_v3": "HYV3ForCausalLM",
    "lfm2_moe": "Lfm2MoeForCausalLM",
    "mellum": "MellumForCausalLM",
    "muse_spark_text": "MuseSparkForConditionalGeneration",
    "nemotron_h": "NemotronHForCausalLM",
    "qwen3_omni_moe_text": "Qwen3OmniMoeForConditionalGeneration",
    "step3p5": "Step3p5ForCausalLM",
}
"""More of them, of which only the attention is looked at."""
WRAPPERS = {
    "cohere2_vision": ("Cohere2VisionForConditionalGeneration", "cohere2", "Cohere2ForCausalLM"),
    "gemma3": ("Gemma3ForConditionalGeneration", "gemma3_text", ""),
    "gemma3n": ("Gemma3nForConditionalGeneration", "gemma3n_text", ""),
    "gemma4": ("Gemma4ForConditionalGeneration", "gemma4_text", ""),
    "glm4v": ("Glm4vForConditionalGeneration", "glm4v_text", ""),
    "glm4v_moe": ("Glm4vMoeForConditionalGeneration", "glm4v_moe_text", ""),
    "glmasr": ("GlmAsrForConditionalGeneration", "llama", ""),
    "interns1": ("InternS1ForConditionalGeneration", "qwen3", ""),
    "lfm2_vl": ("Lfm2VlForConditionalGeneration", "lfm2", "Lfm2ForCausalLM"),
    "llama4": ("Llama4ForConditionalGeneration", "llama4_text", ""),
    "mllama": ("MllamaForConditionalGeneration", "mllama_text_model", ""),
    "qwen2_5_vl": ("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl_text", ""),
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", "qwen2", ""),
    "qwen2_vl": ("Qwen2VLForConditionalGeneration", "qwen2_vl_text", ""),
    "qwen3_vl": ("Qwen3VLForConditionalGeneration", "qwen3_vl_text", ""),
    "qwen3_vl_moe": ("Qwen3VLMoeForConditionalGeneration", "qwen3_vl_moe_text", ""),
    "voxtral": ("VoxtralForConditionalGeneration", "llama", "LlamaForCausalLM"),
}
"""Types with other inputs beside text: their class, the text model's type, and its class where the
weights are handed on to it."""
OWN_TEXT = {"InternS1ForConditionalGeneration": "Qwen3ForCausalLM"}
"""Wrappers that take the class of their text model from its config, and that of `WRAPPERS` here."""
STRIPPED = ("falcon_h1", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
"""Those whose parameters lie in the layer itself."""
SPELLINGS = {
    "ours": ("k_scale", "v_scale"),
    "the parameter's": ("attn.k_scale", "attn.v_scale"),
    "ModelOpt's": ("k_proj.k_scale", "v_proj.v_scale"),
    "Quark's": ("k_proj.output_scale", "v_proj.output_scale"),
    "one": ("kv_scale",),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model_type", MODELS)
def test_a_scale_is_used_dropped_or_refused_as_the_loader_does(
    tmp_path: Path, model_type: str, spelling: str
) -> None:
    scales = spell(*SPELLINGS[spelling])
    folder = save_folder(tmp_path / "f", scales, quantization=FP8)
    report = ask("sglang", folder, plain_geometry(model_type=model_type))
    path = "model.layers.{}" + ("" if model_type in STRIPPED else ".self_attn")
    places = spell("attn.k_scale", "attn.v_scale", path=path)
    places = places if gives_scales_a_place(MODELS[model_type]) else {}
    expect(report, spelling, lambda: load(MODELS[model_type], to_tensors(scales), places), places)


@pytest.mark.parametrize("spelling", SPELLINGS)
@pytest.mark.parametrize("model_type", WRAPPERS)
def test_a_model_with_other_inputs_loads_scales_as_its_class_does(
    tmp_path: Path, model_type: str, spelling: str
) -> None:
    architecture, text_type, text = WRAPPERS[model_type]
    path = "model.language_model.layers.{}.self_attn"
    scales = spell(*SPELLINGS[spelling], path=path)
    folder = save_folder(tmp_path / "f", scales, quantization=FP8)
    geometry = moved_geometry(path, model_type=text_type, architecture=architecture)
    report = ask("sglang", folder, geometry)
    places = find_wrapped_places(architecture)
    expect(
        report, spelling, lambda: load(architecture, to_tensors(scales), places, text=text), places
    )


def to_tensors(scales: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in scales.items()}


def expect(
    report: EngineReport,
    spelling: str,
    run: Callable[[], Mapping[str, object]],
    places: Mapping[str, object],
) -> None:
    """Compare a report with what the loader does."""
    found = {verdict.status.value for layer in report.layers for verdict in (layer.k, layer.v)}
    assert found == {find_outcome(run, places, spelling)}


def find_wrapped_places(architecture: str) -> dict[str, object]:
    """Give the parameters for scales of a model with other inputs, below every root there is."""
    roots = ("model.", "language_model.", "model.language_model.", "language_model.model.")
    return {
        place: value
        for root in roots
        for place, value in spell(
            "attn.k_scale", "attn.v_scale", path=root + "layers.{}.self_attn"
        ).items()
        if gives_scales_a_place(OWN_TEXT.get(architecture, architecture))
    }


def find_outcome(
    run: Callable[[], Mapping[str, object]], places: Mapping[str, object], spelling: str
) -> str:
    """Tell what a loader does with scales, whichever root its parameters have."""
    try:
        loaded = set(run())
    except (KeyError, AssertionError, ValueError):
        return "refused"
    roots = {place.partition("layers.")[0] for place in loaded}
    wanted = {
        place
        for place in places
        if place.partition("layers.")[0] in roots and (spelling != "one" or "k_scale" in place)
    }
    return "dropped" if not loaded else "used" if loaded == wanted else "in part"
