"""What a release of SGLang does with KV scales, by its own code.

What is opened of a package is kept (`sglang_sources.py`), so that each release has a process of its
own: `python -m tests.real_engines.sglang_survey` prints as JSON what `survey_release` gives.
"""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from tests.engines.check_handmade import spell
from tests.real_engines.sglang_models import _parse, hold_kv_scales, load, read_classes
from tests.real_engines.sglang_sources import (
    REQUIREMENT,
    gives_scales_a_place,
    list_models_with_scales,
)

ROOT = Path(__file__).parents[2]
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
        *("cohere", "cohere2", "ernie4_5_moe", "exaone4", "falcon_h1", "gemma", "gemma2"),
        *("gemma3_text", "gemma3n_text", "gemma4_text", "glm4", "glm4_moe", "gpt_oss", "granite"),
        *("granitemoehybrid", "hunyuan_v1_dense", "hunyuan_v1_moe", "lfm2", "llama"),
        *("llama4_text", "minicpm3", "minimax_m2", "mistral", "mixtral", "olmo", "olmo2", "olmoe"),
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
def survey_release(requirement: str) -> Mapping[str, Any]:
    """Ask a process of its own for all that `list_found` lists of a release."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.real_engines.sglang_survey"],
        env={**os.environ, REQUIREMENT: requirement, "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    found: Mapping[str, Any] = json.loads(done.stdout)
    return found


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
            for name, architecture in list_types().items()
            if is_there(architecture)
        },
        "files": [
            name
            for name, architecture in list_types().items()
            if architecture in list_models_with_scales().difference(_FAILING_LOADERS)
        ],
        "methods": [method for method in CONFIGS if gives_parameters(method)],
        "zeros": hold_zeros(),
    }


def list_types() -> dict[str, str]:
    """Name the class of model types."""
    texts = {text_type: architecture for architecture, text_type, _ in WRAPPERS.values()}
    return texts | MODEL_FOR_CAUSAL_LM_MAPPING_NAMES | _OTHER_TYPES | OTHERS | MODELS


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
