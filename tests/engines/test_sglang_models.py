"""What `check` says of a scale's name is what the model's own loader in SGLang does with it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dialects.check_handmade import FP8, ask, plain_geometry, save_folder, spell

from .sglang_models import load

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

    try:
        loaded = load(MODELS[model_type], scales, places)
    except (KeyError, AssertionError):
        expected = "refused"
    else:
        wanted = {place for place in places if spelling != "one" or "k_scale" in place}
        expected = "used" if loaded == wanted else "dropped" if not loaded else "in part"

    found = {verdict.status.value for layer in report.layers for verdict in (layer.k, layer.v)}
    assert found == {expected}
