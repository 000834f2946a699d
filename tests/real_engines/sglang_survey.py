"""Print as JSON what a release of SGLang does with KV scales, by its own code.

python -m tests.real_engines.sglang_survey
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout

import torch

from tests.engines.check_handmade import spell
from tests.real_engines.sglang_attention import gives_scales_a_place
from tests.real_engines.sglang_loader import list_models_with_scales
from tests.real_engines.sglang_models import _parse, hold_kv_scales, load, read_classes

QUANTIZATION = "sglang/srt/layers/quantization/"
CONFIGS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "compressed-tensors": (
        "compressed_tensors/compressed_tensors.py",
        ("CompressedTensorsConfig",),
    ),
    "fp8": ("fp8.py", ("Fp8Config",)),
    "modelopt": ("modelopt_quant.py", ("ModelOptFp8Config", "ModelOptQuantConfig")),
    "quark": ("quark/quark.py", ("QuarkConfig",)),
}
"""By method: the file and the classes of its config; the second is a base of the first."""
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


def main() -> None:
    """Run the loaders of all models on the names of scales."""
    with redirect_stdout(sys.stderr):  # some loaders print
        found = list_found()
    json.dump(found, sys.stdout)


def list_found() -> dict[str, object]:
    """Collect everything."""
    return {
        "models": {name: survey(name) for name in MODELS if is_there(MODELS[name])},
        "wrappers": {
            name: survey_wrapper(name) for name in WRAPPERS if is_there(WRAPPERS[name][0])
        },
        "places": {
            name: gives_scales_a_place(architecture)
            for name, architecture in (MODELS | OTHERS).items()
            if is_there(architecture)
        },
        "files": sorted(list_models_with_scales()),
        "methods": [method for method in CONFIGS if gives_parameters(method)],
        "zeros": hold_zeros(),
    }


def is_there(architecture: str) -> bool:
    """Tell whether the release has a class."""
    return architecture in read_classes()


def survey(name: str) -> dict[str, str]:
    """Give what becomes of each spelling in a text model."""
    architecture = MODELS[name]
    path = "model.layers.{}" + ("" if name in STRIPPED else ".self_attn")
    places = spell("attn.k_scale", "attn.v_scale", path=path)
    places = places if gives_scales_a_place(architecture) else {}
    return {
        spelling: find_outcome(
            lambda leaves=leaves: load(architecture, to_tensors(spell(*leaves)), places),
            places,
            spelling,
        )
        for spelling, leaves in SPELLINGS.items()
    }


def survey_wrapper(name: str) -> dict[str, str]:
    """Give what becomes of each spelling in a model with other inputs."""
    architecture, _, text = WRAPPERS[name]
    places = find_wrapped_places(architecture)

    def run(leaves: tuple[str, ...]) -> Callable[[], Mapping[str, object]]:
        scales = to_tensors(spell(*leaves, path="model.language_model.layers.{}.self_attn"))
        return lambda: load(architecture, scales, places, text=text)

    return {
        spelling: find_outcome(run(leaves), places, spelling)
        for spelling, leaves in SPELLINGS.items()
    }


def to_tensors(scales: Mapping[str, object]) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in scales.items()}


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


def gives_parameters(method: str) -> bool:
    """Tell whether a method's config gives attention a method of its own."""
    file, names = CONFIGS[method]
    classes = (
        node
        for node in _parse(QUANTIZATION + file).body
        if isinstance(node, ast.ClassDef) and node.name in names
    )
    return any("RadixAttention" in ast.unparse(node) for node in classes)


def hold_zeros() -> list[float] | str:
    """Give what a layer multiplies by, whose scales are zero."""
    try:
        return list(hold_kv_scales(torch.tensor(0.0), torch.tensor(0.0)))
    except AssertionError:
        return "refused"


if __name__ == "__main__":
    main()
