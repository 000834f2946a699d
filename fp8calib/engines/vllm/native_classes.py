"""Which model classes each release of vLLM has itself (`models/registry.py`, read)."""

from __future__ import annotations

from collections.abc import Mapping

from fp8calib.engines.vllm.model_types import (
    CREATED_LINEARS,
    LOADERS,
    NATIVE_WRAPPERS,
    PLAIN_HEAD_TYPES,
    RENAMED_LINEARS,
    SEPARATE_TYPES,
    TYPES_WITHOUT_KV_SCALES,
    UNPACKED_TYPES,
    UNQUANTIZED_LINEARS,
    UNSUPPORTED_TYPES,
)
from fp8calib.engines.vllm.releases import VLLM_0_32, Release
from fp8calib.geometry.model_geometry import ModelGeometry

_Minor = tuple[int, int]

_BY_FIRST: Mapping[_Minor, str] = {
    (0, 11): (
        "AfmoeForCausalLM CwmForCausalLM DeepseekV32ForCausalLM FlexOlmoForCausalLM "
        "KimiLinearForCausalLM Lfm2MoeForCausalLM LongcatFlashForCausalLM "
        "MiniMaxM2ForCausalLM Olmo3ForCausalLM PaddleOCRVLForConditionalGeneration "
        "Qwen3OmniMoeForConditionalGeneration Qwen3VLForConditionalGeneration "
        "Qwen3VLMoeForConditionalGeneration"
    ),
    (0, 12): "HunYuanVLForConditionalGeneration",
    (0, 13): "AudioFlamingo3ForConditionalGeneration Jais2ForCausalLM",
    (0, 14): (
        "GlmAsrForConditionalGeneration IQuestCoderForCausalLM "
        "IQuestLoopCoderForCausalLM Lfm2VlForConditionalGeneration "
        "MiMoV2FlashForCausalLM"
    ),
    (0, 15): "Glm4MoeLiteForCausalLM Step3p5ForCausalLM",
    (0, 16): (
        "GlmMoeDsaForCausalLM GlmOcrForConditionalGeneration "
        "MusicFlamingoForConditionalGeneration Qwen3ASRForConditionalGeneration"
    ),
    (0, 17): "AXK1ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForConditionalGeneration",
    (0, 18): "HyperCLOVAXForCausalLM OlmoHybridForCausalLM",
    (0, 19): "CohereAsrForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration",
    (0, 20): (
        "DeepseekV4ForCausalLM Exaone4_5_ForConditionalGeneration "
        "Granite4VisionForConditionalGeneration HYV3ForCausalLM "
        "Ministral3ForCausalLM"
    ),
    (0, 21): "Cohere2MoeForCausalLM LagunaForCausalLM QianfanOCRForConditionalGeneration",
    (0, 22): "MellumForCausalLM MiniCPMV4_6ForConditionalGeneration",
    (0, 23): (
        "Gemma4UnifiedForConditionalGeneration "
        "GraniteSpeechPlusForConditionalGeneration Step3p7ForConditionalGeneration"
    ),
    (0, 24): (
        "DiffusionGemmaForBlockDiffusion HrmTextForCausalLM MiniMaxM3SparseForConditionalGeneration"
    ),
    (0, 26): (
        "Cosmos3EdgeForConditionalGeneration InklingForCausalLM InklingForConditionalGeneration"
    ),
    (0, 27): "ExaoneMoeForCausalLM Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    (0, 28): "MuseGlimmerForConditionalGeneration",
    (0, 29): (
        "GraniteMoeSWAForCausalLM GraniteSWAForCausalLM HYV4ForCausalLM "
        "Qwen4ExpForCausalLM Qwen4ExpForConditionalGeneration"
    ),
    (0, 30): "CohereCompassForConditionalGeneration Glm5NextForConditionalGeneration",
}
_BY_LAST: Mapping[_Minor, str] = {
    (0, 10): "MllamaForConditionalGeneration",
    (0, 12): "Phi4MultimodalForCausalLM",
    (0, 23): "BambaForCausalLM Dots1ForCausalLM MiniMaxForCausalLM",
    (0, 24): (
        "AyaVisionForConditionalGeneration GPTBigCodeForCausalLM "
        "MusicFlamingoForConditionalGeneration Starcoder2ForCausalLM"
    ),
    (0, 25): "FuyuForCausalLM Olmo2ForCausalLM OlmoForCausalLM PersimmonForCausalLM",
    (0, 28): (
        "ChameleonForConditionalGeneration FlexOlmoForCausalLM "
        "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM "
        "HunYuanVLForConditionalGeneration MptForCausalLM Olmo3ForCausalLM"
    ),
    (0, 31): (
        "ArceeForCausalLM CwmForCausalLM GPTNeoXForCausalLM GlmForCausalLM "
        "Jais2ForCausalLM MellumForCausalLM PhiForCausalLM SeedOssForCausalLM"
    ),
}
_TABLES_OF_LINEARS = (
    *(CREATED_LINEARS, PLAIN_HEAD_TYPES, RENAMED_LINEARS, SEPARATE_TYPES, UNPACKED_TYPES),
    UNQUANTIZED_LINEARS,
)
_UNLISTED_UNTIL: Mapping[str, _Minor] = {
    "Cohere2VisionForConditionalGeneration": (0, 20),
    "DeepseekV4ForCausalLM": (0, 21),
    "MiMoV2FlashForCausalLM": (0, 20),
    "MiniMaxForCausalLM": (0, 23),
    "MiniMaxM2ForCausalLM": (0, 14),
    "Step3p5ForCausalLM": (0, 21),
}
"""The last releases whose class joins projections without a `packed_modules_mapping` (read)."""
_PLACES_SINCE: Mapping[str, _Minor] = {"falcon_h1": (0, 16), "nemotron_h": (0, 14)}
"""The first release whose attention has parameters for scales, where it had none before."""
_FIRST = {name: minor for minor, names in _BY_FIRST.items() for name in names.split()}
_LAST = {name: minor for minor, names in _BY_LAST.items() for name in names.split()}


def find_first(geometry: ModelGeometry) -> _Minor:
    """Find the first release that has a model's class; (0, 0) where it is not later than 0.10."""
    return _FIRST.get(geometry.architecture, (0, 0))


def has_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release has the class of a model; if not, it may run transformers'."""
    name = geometry.architecture
    if release.minor < find_first(geometry):
        return False
    if name in _LAST:
        return release.minor <= _LAST[name]
    return geometry.model_type in LOADERS or name in NATIVE_WRAPPERS


def is_unsupported(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether a release runs a model in no way."""
    if geometry.model_type in UNSUPPORTED_TYPES:
        return not has_class(geometry, release)
    return release.minor < find_first(geometry)


def lacks_places(model_type: str, release: Release) -> bool:
    """Check whether the attention of a model type has no parameters for scales."""
    if model_type in TYPES_WITHOUT_KV_SCALES:
        return True
    return release.minor < _PLACES_SINCE.get(model_type, (0, 0))


def is_other_class(geometry: ModelGeometry, release: Release) -> bool:
    """Check whether an older release has a class that joins or names linears in its own way.

    Those of 0.32 are known: the tables of `model_types.py` were found by running it.
    """
    if release.minor >= VLLM_0_32.minor:
        return False
    is_listed = any(geometry.model_type in table for table in _TABLES_OF_LINEARS)
    if release.minor <= _UNLISTED_UNTIL.get(geometry.architecture, (0, 0)):
        return True
    return is_listed or has_class(geometry, release) is not has_class(geometry, VLLM_0_32)
