"""The model types for which vLLM, 0.32.0 and 0.33.0, loads KV scales in another way, or not."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

UNSUPPORTED_TYPES = ("bamba", "diffllama", "minimax", "mpt", "recurrent_gemma", "xglm")
"""Model types that vLLM does not start (run); an earlier release started some of them."""
TYPES_WITHOUT_KV_SCALES = ("jamba", "lfm2", "lfm2_moe", "zamba2")
"""Model types whose `Attention` vLLM creates without a `quant_config`: it has no parameter for
a scale, and the loader fails on one (jamba, lfm2 and lfm2_moe: run in 0.32.0; zamba2: read)."""
TYPES_WITHOUT_CACHE_CONFIG = ("falcon",)
"""Model types whose `Attention` vLLM creates without a `cache_config` (`models/falcon.py`; run in
0.32.0): only a kv_cache_scheme of compressed-tensors makes their cache FP8."""
EXPANDED_TYPES = ("minicpm3", "youtu")
"""Model types with latent attention whose K and V vLLM caches expanded to heads: vLLM's class
does so itself (minicpm3, read), or runs transformers' (youtu, run)."""

TYPES_WITH_QUARK_EXPERTS = ("gpt_oss",)
"""Model types with another loader for Quark's checkpoints, which finds no experts in one tensor
(vLLM 0.32.0 `models/gpt_oss.py`, _load_weights_quark, run)."""
RENAMING_TYPES = ("mistral3",)
"""Model types whose `load_weights` takes weight_scale_inv and activation_scale for scales of
tensors (`models/mistral3.py`)."""


class LoaderKind(StrEnum):
    """How the loader of a model treats the names of scales.

    All but STRICT and LENIENT are `AutoWeightsLoader` (`models/utils.py`).
    """

    BACKEND = "backend"
    """vLLM runs transformers' own class. It renames k_proj to qkv_proj before the quantization
    method renames scales, and adds the root `model.` to a name that has none."""
    FUSES_FIRST = "fuses-first"
    """The outermost loader has the model's mapper of k_proj to qkv_proj, which goes first."""
    NAMES_FIRST = "names-first"
    """The outermost loader renames scales; the mapper of k_proj belongs to an inner one."""
    UNFORGIVING = "unforgiving"
    """So it is, but the inner loader sees no `quant_config`: it ignores no scale without a
    parameter."""
    STRICT = "strict"
    """`load_weights` of its own: a name without a parameter is a KeyError."""
    LENIENT = "lenient"
    """`load_weights` of its own, which skips k_scale, v_scale, q_scale and their zero points where
    there is no parameter (`maybe_remap_kv_scale_name`); another name is a KeyError."""


_TYPES_BY_LOADER: Mapping[LoaderKind, tuple[str, ...]] = {
    LoaderKind.FUSES_FIRST: (
        *("afmoe", "apertus", "cohere", "cohere2", "cohere2_moe", "exaone4", "exaone_moe"),
        *("falcon_h1", "gemma", "gemma2", "gemma3_text", "gptj", "hyperclovax", "nemotron"),
        *("nemotron_h", "olmoe", "opt", "qwen2_moe", "stablelm"),
    ),
    LoaderKind.NAMES_FIRST: (
        *("ernie4_5", "gemma3n_text", "gemma4_text", "glm4", "granite", "granite_swa"),
        *("granitemoe", "granitemoe_swa", "granitemoeshared", "internlm3", "iquestcoder"),
        *("laguna", "llama", "minimax_m2", "ministral3", "mistral", "mixtral", "olmo_hybrid"),
        *("phi3", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe"),
    ),
    LoaderKind.UNFORGIVING: (
        *("bloom", "ernie4_5_moe", "glm4_moe", "gpt2", "jamba", "lfm2", "lfm2_moe", "qwen3_next"),
        *("zamba2",),
    ),
    LoaderKind.STRICT: ("falcon", "granitemoehybrid", "llama4_text", "longcat_flash", "minicpm3"),
    LoaderKind.LENIENT: (
        *("axk1", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite"),
        *("glm_moe_dsa", "gpt_oss", "hy_v3", "kimi_linear", "mimo_v2_flash", "step3p5"),
    ),
}
"""Read in the classes of 0.32.0; of those that a CPU builds (47), names were also given to the
loader, one by one. Every other type runs on the backend."""
LOADERS: Mapping[str, LoaderKind] = {
    model_type: kind for kind, types in _TYPES_BY_LOADER.items() for model_type in types
}
FUSING_LENIENT_TYPES = ("gpt_oss",)
"""Lenient types that rename q_proj to qkv_proj before they look for a parameter (run)."""
NATIVE_WRAPPERS = frozenset(
    f"{name}ForConditionalGeneration"
    for name in (
        *("Aria", "AudioFlamingo3", "Blip2", "Cohere2Vision", "Ernie4_5_VLMoe", "Exaone4_5_"),
        *("Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Glm4v", "Glm4vMoe", "GlmAsr", "GlmOcr"),
        *("Granite4Vision", "GraniteSpeech", "GraniteSpeechPlus", "Idefics3", "InternVL", "Lfm2Vl"),
        *("Llama4", "Llava", "LlavaNext", "LlavaNextVideo", "LlavaOnevision", "Mistral3", "Molmo2"),
        *("MuseGlimmer", "PaddleOCRVL", "PaliGemma", "QianfanOCR", "Qwen2Audio", "Qwen2VL"),
        *("Qwen2_5Omni", "Qwen2_5_VL", "Qwen3ASR", "Qwen3OmniMoe", "Qwen3VL", "Qwen3VLMoe"),
        *("Qwen3_5", "Qwen3_5Moe", "SmolVLM", "Step3p7", "Voxtral", "Whisper"),
    )
)
"""Classes with other inputs beside text that vLLM has itself (`models/registry.py`): their loader
renames scales before that of the text model fuses projections (12 of them run)."""
ADDED_ROOTS: Mapping[str, str] = {
    **dict.fromkeys(("ministral3", "mistral", "opt"), "model."),
    **dict.fromkeys(("bloom", "gpt2"), "transformer."),
}
"""The roots that native types add to a name without one (`mistral.py`, `opt.py`, `bloom.py`,
`gpt2.py`)."""
HEADLESS_TYPES = ("gemma2", "gemma3n_text")
"""Types whose class has no output layer, but computes with the embedding. They stop at one that is
stored and that config.json unties (`models/gemma2.py`, `models/gemma3n.py`: run in 0.32.0, read in
0.26.0 to 0.33.0)."""
SKIPPED_ROOTS: Mapping[str, str] = {
    **dict.fromkeys(("nemotron_h", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), "mtp."),
    **dict.fromkeys(("cohere", "cohere2"), "lm_head."),
}
"""What the names begin with that the loader of a type skips."""
LENIENT_TO_COMPANIONS = ("exaone_moe", "laguna", "qwen3_moe")
"""Types whose loader ignores a weight_scale and an input_scale without a parameter."""
