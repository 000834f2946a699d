"""What a release of SGLang does with KV scales, by its own code."""

import ast
import sys
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from typing import Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.engines.check_handmade import spell
from tests.real_engines.package import Package
from tests.real_engines.sglang_models import SglangModels

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
_NAMES = {**MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, **MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES}
MODELS = {
    name: _NAMES[name]
    for name in (
        *("afmoe", "cohere", "cohere2", "cohere2_moe", "ernie4_5_moe", "exaone4", "falcon_h1"),
        *("gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe"),
        *("gpt_oss", "granite", "granite_swa", "granitemoehybrid", "hunyuan_v1_dense"),
        *("hunyuan_v1_moe", "laguna", "lfm2", "llama", "llama4_text", "minicpm3", "minimax_m2"),
        *("mistral", "mixtral", "olmo", "olmo2", "olmoe"),
        *("opt", "persimmon", "phi", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("qwen3_next", "stablelm", "starcoder2"),
    )
} | {
    "phimoe": "PhiMoEForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForConditionalGeneration",
}
"""Model types, and the class that SGLang has for them; their attention is called self_attn."""
OTHERS = {
    name: _NAMES[name]
    for name in (
        *("arcee", "dbrx", "deepseek_v2", "gpt2", "gptj", "hy_v3", "lfm2_moe", "mellum"),
        "nemotron_h",
    )
} | {
    "exaone_moe": "ExaoneMoEForCausalLM",
    "muse_spark_text": "MuseSparkForConditionalGeneration",
    "qwen3_omni_moe_text": "Qwen3OmniMoeForConditionalGeneration",
    "step3p5": "Step3p5ForCausalLM",
}
"""More of them, of which only the attention is looked at."""
_OTHER_TYPES = {
    "glm5_next": "Glm5NextForConditionalGeneration",
    "mimo": "MiMoForCausalLM",
    "mimo_v2": "MiMoV2ForCausalLM",
}
"""Model types with a file of scales that transformers has no text class of."""
_FAILING_LOADERS = (
    "HunYuanDenseV1ForCausalLM",
    "HunYuanMoEV1ForCausalLM",
    "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration",
)
"""Classes whose `load_kv_cache_scales` always fails: Llama 4's inner model has none, HunYuan's
attention no `kv_scale`."""
_TEXT_TYPES = {
    "cohere2_vision": "cohere2",
    **{name: f"{name}_text" for name in ("gemma3", "gemma3n", "gemma4", "glm4v", "glm4v_moe")},
    **{name: f"{name}_text" for name in ("llama4", "qwen2_5_vl", "qwen2_vl", "qwen3_vl")},
    "qwen3_vl_moe": "qwen3_vl_moe_text",
    "mllama": "mllama_text_model",
    "paddleocr_vl": "paddleocr_vl_text",
    "glm_ocr": "glm_ocr_text",
    "glmasr": "llama",
    "lfm2_vl": "lfm2",
    "qwen2_audio": "qwen2",
    "voxtral": "llama",
}
_HANDED_ON = ("cohere2_vision", "lfm2_vl", "voxtral")
WRAPPERS = {
    name: (_NAMES[name], text, _NAMES[text] if name in _HANDED_ON else "")
    for name, text in _TEXT_TYPES.items()
} | {"interns1": ("InternS1ForConditionalGeneration", "qwen3", "")}
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


@cache
def survey_release(package: Package) -> Mapping[str, Any]:
    """Run the loaders of all models on the names of scales, and look at what else concerns them."""
    with redirect_stdout(sys.stderr):  # some loaders print
        return _Survey(package).list_found()


def list_types() -> dict[str, str]:
    """Name the class of model types."""
    texts = {text_type: architecture for architecture, text_type, _ in WRAPPERS.values()}
    return texts | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | _OTHER_TYPES | OTHERS | MODELS


class _Survey:
    """Asks a release.

    Args:
        package: its sources.
    """

    def __init__(self, package: Package) -> None:
        self._package = package
        self._models = SglangModels(package)

    def list_found(self) -> dict[str, Any]:
        """Collect everything, of the classes that the release has."""
        classes = self._models.classes
        types = {name: each for name, each in list_types().items() if each in classes}
        return {
            "models": {name: self._ask_text(name) for name in MODELS if MODELS[name] in classes},
            "wrappers": {
                name: self._ask_wrapper(*of_it)
                for name, of_it in WRAPPERS.items()
                if of_it[0] in classes
            },
            "places": {
                name: self._models.gives_scales_a_place(each) for name, each in types.items()
            },
            "files": [
                name
                for name, each in types.items()
                if each in self._models.entries and each not in _FAILING_LOADERS
                if self._models.reads_scale_file(each)
            ],
            "methods": [method for method in CONFIGS if self._gives_parameters(method)],
            "zeros": self._hold_zeros(),
        }

    def _ask_text(self, name: str) -> dict[str, str]:
        """Give what becomes of each spelling in a text model."""
        architecture = MODELS[name]
        path = "model.layers.{}" + ("" if name in STRIPPED else ".self_attn")
        places = spell("attn.k_scale", "attn.v_scale", path=path)
        places = places if self._models.gives_scales_a_place(architecture) else {}
        return self._ask(architecture, "model.layers.{}.self_attn", places)

    def _ask_wrapper(self, architecture: str, _: str, text: str) -> dict[str, str]:
        """Give the same of a model with other inputs, below every root that parameters have."""
        roots = ("model.", "language_model.", "model.language_model.", "language_model.model.")
        leaves = ("attn.k_scale", "attn.v_scale")
        has_places = self._models.gives_scales_a_place(OWN_TEXT.get(architecture, architecture))
        places: dict[str, object] = {}
        for root in roots if has_places else ():
            places |= spell(*leaves, path=root + "layers.{}.self_attn")
        return self._ask(architecture, "model.language_model.layers.{}.self_attn", places, text)

    def _ask(
        self, architecture: str, path: str, places: Mapping[str, object], text: str = ""
    ) -> dict[str, str]:
        """Give what a loader does with scales of each spelling below a path."""
        found = {}
        for spelling, leaves in SPELLINGS.items():
            scales = {n: torch.tensor(value) for n, value in spell(*leaves, path=path).items()}
            try:
                loaded = {*self._models.load(architecture, scales, places, text=text)}
            except (KeyError, AssertionError, ValueError):
                found[spelling] = "refused"
                continue
            roots = {place.partition("layers.")[0] for place in loaded}
            wanted = {
                place
                for place in places
                if place.partition("layers.")[0] in roots
                and (spelling != "one" or "k_scale" in place)
            }
            found[spelling] = "used" if loaded == wanted else "in part"
            if not loaded:
                found[spelling] = "dropped"
        return found

    def _gives_parameters(self, method: str) -> bool:
        """Tell whether a method's config gives attention a method of its own."""
        file, names = CONFIGS[method]
        return any(
            "RadixAttention" in ast.unparse(node)
            for node in self._package.parse(QUANTIZATION + file).body
            if isinstance(node, ast.ClassDef) and node.name in names
        )

    def _hold_zeros(self) -> list[float] | str:
        """Give what a layer multiplies by, whose scales are zero."""
        try:
            return list(self._models.hold_kv_scales(torch.tensor(0.0), torch.tensor(0.0)))
        except AssertionError:
            return "refused"
