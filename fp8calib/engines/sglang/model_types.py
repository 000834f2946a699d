"""How the models of SGLang load KV scales, by model type (`srt/models/`).

The tables are those of 0.5.23; the ones that end in SINCE and UNTIL give the number of the release
from which an entry holds, or up to which another one did.
"""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.sglang.releases import Release
from fp8calib.geometry.model_geometry import ModelGeometry

JSON_TYPES = (
    *("llama", "qwen2", "qwen3", "mimo", "mimo_v2", "mimo_v2_flash", "opt", "glm4", "glm5_next"),
    *("hunyuan_v1_dense", "hunyuan_v1_moe", "exaone4", "arcee", "apertus", "internlm3"),
    *("iquestcoder", "ministral3", "mistral", "phi3"),
)
"""Model types whose classes have `load_kv_cache_scales` (SGLang 0.5.23 `srt/models/`); the last
five are subclasses of llama's. llama4's class inherits it too, but its inner model does not."""
_JSON_SINCE = {"glm4": 4}
"""The first release that has it, where the class is older."""
_CLASSES_SINCE: Mapping[int, tuple[str, ...]] = {
    2: ("LongcatFlashForCausalLM", "OPTForCausalLM", "Qwen3NextForCausalLM"),
    3: (
        *("ApertusForCausalLM", "DeepseekV32ForCausalLM", "FalconH1ForCausalLM"),
        *("NemotronHForCausalLM", "Qwen3VLForConditionalGeneration"),
        *("Qwen3VLMoeForConditionalGeneration", "SolarForCausalLM", "Starcoder2ForCausalLM"),
    ),
    4: (
        *("KimiLinearForCausalLM", "MiniMaxM2ForCausalLM"),
        "Qwen3OmniMoeForConditionalGeneration",
    ),
    6: ("Ministral3ForCausalLM", "PaddleOCRVLForConditionalGeneration"),
    7: ("GlmAsrForConditionalGeneration", "MiMoV2FlashForCausalLM"),
    8: ("AfmoeForCausalLM", "Glm4MoeLiteForCausalLM", "IQuestCoderForCausalLM"),
    9: (
        *("Ernie4_5_VLMoeForConditionalGeneration", "Exaone4ForCausalLM", "ExaoneMoEForCausalLM"),
        *("GPTJForCausalLM", "GlmMoeDsaForCausalLM", "GlmOcrForConditionalGeneration"),
        *("GraniteMoeHybridForCausalLM", "Lfm2ForCausalLM", "Lfm2MoeForCausalLM"),
        *("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "Step3p5ForCausalLM",
    ),
    10: ("Lfm2VlForConditionalGeneration",),
    11: (
        *("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "HYV3ForCausalLM"),
        *("MiMoV2ForCausalLM", "Qwen3ASRForConditionalGeneration"),
        "VoxtralForConditionalGeneration",
    ),
    12: (
        *("DeepseekV4ForCausalLM", "Gemma4AssistantForCausalLM", "LagunaForCausalLM"),
        "MiniCPMV4_6ForConditionalGeneration",
    ),
    13: (
        *("Cohere2MoeForCausalLM", "Cohere2VisionForConditionalGeneration"),
        *("Gemma4UnifiedForConditionalGeneration", "Step3p7ForConditionalGeneration"),
    ),
    14: ("ZayaForCausalLM",),
    15: ("HrmTextForCausalLM",),
    16: (
        *("InklingForConditionalGeneration", "MellumForCausalLM"),
        "MiniMaxM3SparseForConditionalGeneration",
    ),
    17: ("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"),
    18: ("MuseGlimmerForConditionalGeneration",),
    19: (
        *("Dots3NoteForCausalLM", "GraniteMoeSWAForCausalLM", "GraniteMoeSharedForCausalLM"),
        "GraniteSWAForCausalLM",
    ),
    20: (
        *("Cosmos3EdgeForConditionalGeneration", "Glm5NextForConditionalGeneration"),
        *("HYV4ForCausalLM", "Qwen4ExpForConditionalGeneration"),
    ),
    21: ("DiffusionGemmaForBlockDiffusion",),
    22: ("ExaoneMoeForCausalLM",),
    23: (
        *("BeamForCausalLM", "MiniCPMV4_7ForConditionalGeneration"),
        "MuseSparkForConditionalGeneration",
    ),
}
"""Classes that came after 0.5.1, by release. Without a class SGLang runs
transformers' code, whose attention has no parameters of its own (`models/transformers.py`)."""
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
_PLACES_SINCE: Mapping[str, int] = {"qwen3_next": 9, "qwen3_5_text": 17, "qwen3_5_moe_text": 17}
"""Model types of which older releases create it so, too."""
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
_PLAIN_NAMES_SINCE = 19
STRICT_TYPES = frozenset(
    {
        *("ernie4_5_moe", "falcon_h1", "gemma", "gpt2", "gpt_bigcode", "granite", "granite_swa"),
        *("glmasr", "granitemoehybrid", "interns1", "minicpm3", "mllama_text_model", "olmo"),
        *("olmo2", "olmoe", "qwen2_audio", "qwen2_vl_text", "qwen3_next", "stablelm"),
    }
)
"""Model types whose `load_weights` raises an error for a name without a parameter."""
_STRICT_UNTIL: Mapping[str, int] = {
    "glm4": 4,
    "glm4_moe": 4,
    "glm4v_moe_text": 4,
    "qwen2_5_vl_text": 5,
    "glm4v_text": 6,
    "qwen3_vl_text": 7,
}
_STRICT_AGAIN = ("qwen2_5_vl_text", 6)
"""Its loader raises a ValueError in this release, and no error in the next."""
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
_FUSING_UNTIL: Mapping[str, int] = {
    "qwen3": 2,
    "minimax_m2": 10,
    "gemma3": 14,
    "gemma3_text": 14,
    "qwen3_vl_text": 20,
}
_OUTPUTS_FUSED_UNTIL: Mapping[str, int] = {"llama4": 3}
"""Likewise, for Quark's names alone."""
LOSING_TYPES = ("llama4",)
"""Model types that rename every KV scale but then do not load it (`mllama4.py`,
`_handle_scale_remapping`): 1.0."""
_LISTING_CLASSES: Mapping[int, str] = {
    1: (
        "BaiChuanBaseForCausalLM BaichuanForCausalLM DeciLMForCausalLM Ernie4_5_ForCausalLM "
        "Ernie4_5_MoeForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM "
        "Gemma3ForConditionalGeneration Gemma3nForConditionalGeneration GemmaForCausalLM "
        "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM Llama4ForCausalLM "
        "Llama4ForConditionalGeneration Phi4MMForCausalLM PhiForCausalLM"
    ),
    3: "SolarForCausalLM",
    4: "NemotronHForCausalLM",
    6: "PaddleOCRVLForConditionalGeneration",
    7: "Qwen2_5_VLForConditionalGeneration",
    9: (
        "BailingMoELinearForCausalLM BailingMoeV2_5ForCausalLM Exaone4ForCausalLM "
        "GraniteMoeHybridForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM"
    ),
    10: "MiniMaxM2ForCausalLM",
    11: (
        "Gemma4ForCausalLM Gemma4ForConditionalGeneration Qwen3_5ForCausalLM "
        "Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
        "Qwen3_5MoeForConditionalGeneration"
    ),
    12: "InternS2PreviewForConditionalGeneration LagunaForCausalLM",
    13: (
        "Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration "
        "Gemma4UnifiedForConditionalGeneration NemotronHPuzzleForCausalLM"
    ),
    16: "MellumForCausalLM",
    17: "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
    18: (
        "InternS2MobiusForCausalLM InternS2MobiusForConditionalGeneration MuseGlimmerForCausalLM "
        "MuseGlimmerForConditionalGeneration"
    ),
    19: "Dots3NoteForCausalLM DotsNoteOmniForConditionalGeneration KimiK3ForConditionalGeneration",
    20: (
        "Glm5NextForConditionalGeneration HYV4ForCausalLM K2HorizonForCausalLM "
        "NemotronH_Omni_Reasoning_V3 Qwen4ExpForConditionalGeneration XllmForCausalLM"
    ),
    21: "DiffusionGemmaForBlockDiffusion",
    23: (
        "BeamForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration "
        "MuseSparkForConditionalGeneration MuseSparkTextForCausalLM"
    ),
}
"""Classes that say which projections they join (`packed_modules_mapping`), by the first release
that does (read); in others a list of modules has to name the joined one, `qkv_proj`."""
_LISTING_SINCE = {
    name: since for since, names in _LISTING_CLASSES.items() for name in names.split()
}
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


def find_class_release(architecture: str) -> int:
    """Find the number of the first release that has a class; 0 where all have it, or none."""
    return next((since for since, names in _CLASSES_SINCE.items() if architecture in names), 0)


def find_unlisted(architecture: str, release: Release) -> frozenset[str]:
    """Find what a model's class joins without saying of which projections."""
    since = _LISTING_SINCE.get(architecture)
    if since is None or release.number < since:
        return frozenset(_JOINED)
    return frozenset(_JOINED) - {_LISTING_ONE.get(architecture, name) for name in _JOINED}


def find_own_names(model_type: str, release: Release) -> Mapping[str, str]:
    """Give the mapping of a model's own loader; empty where it has none."""
    names = _OWN_MAPPINGS.get(model_type, {})
    is_early = release.number < _PLAIN_NAMES_SINCE
    return {old: new for old, new in names.items() if not (is_early and old in _PLAIN_NAMES)}


def has_place(model_type: str, release: Release) -> bool:
    """Tell whether the attention of a model type has parameters for KV scales."""
    is_late = release.number < _PLACES_SINCE.get(model_type, 0)
    return model_type not in TYPES_WITHOUT_KV_SCALES and not is_late


def is_strict(model_type: str, release: Release) -> bool:
    """Tell whether a name without a parameter is an error."""
    is_again = (model_type, release.number) == _STRICT_AGAIN
    is_early = release.number < _STRICT_UNTIL.get(model_type, 0)
    return model_type in STRICT_TYPES or is_early or is_again


def fuses_first(model_type: str, release: Release, *, is_output: bool) -> bool:
    """Tell whether a scale under a projection is an error, because it is looked for in qkv_proj."""
    until = _FUSING_UNTIL.get(model_type, _OUTPUTS_FUSED_UNTIL.get(model_type, 0) * is_output)
    return model_type in FUSING_TYPES or release.number < until


def takes_sglang_json(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether SGLang's class reads a file of scales; multimodal classes do not."""
    since = max(find_class_release(geometry.architecture), _JSON_SINCE.get(geometry.model_type, 0))
    if release.number < since:
        return False
    is_wrapped = geometry.architecture.endswith(_WRAPPED) and geometry.model_type != "glm5_next"
    return geometry.model_type in JSON_TYPES and not is_wrapped
