"""The releases of SGLang whose rules are known, and what differs between them.

The functions that the rules cite were compared between neighbours, each in the wheel of its last
patch. What models do with the names of scales was found by running their loaders on names.
"""

from __future__ import annotations

from fp8calib.engines.evidence import Evidence
from fp8calib.engines.facts import Fact, make_releases

_RUN = Evidence.RUN
_COMPRESSED = "compressed_tensors/compressed_tensors.py"
_CLASSES = {
    "0.5.17": "Qwen3_5ForCausalLM Qwen3_5MoeForCausalLM",
    "0.5.18": "MuseGlimmerForConditionalGeneration",
    "0.5.19": (
        "Dots3NoteForCausalLM GraniteMoeSWAForCausalLM GraniteMoeSharedForCausalLM "
        "GraniteSWAForCausalLM"
    ),
    "0.5.20": (
        "Cosmos3EdgeForConditionalGeneration Glm5NextForConditionalGeneration HYV4ForCausalLM "
        "Qwen4ExpForConditionalGeneration"
    ),
    "0.5.21": "DiffusionGemmaForBlockDiffusion",
    "0.5.22": "ExaoneMoeForCausalLM",
    "0.5.23": (
        "BeamForCausalLM MiniCPMV4_7ForConditionalGeneration MuseSparkForConditionalGeneration"
    ),
}
"""Without a class SGLang runs transformers' code, whose attention has no parameters of its own
(`models/transformers.py`)."""
_LISTING = {
    "": (
        "BaiChuanBaseForCausalLM BaichuanForCausalLM BailingMoELinearForCausalLM "
        "BailingMoeV2_5ForCausalLM Cohere2MoeForCausalLM Cohere2VisionForConditionalGeneration "
        "DeciLMForCausalLM Ernie4_5_ForCausalLM Ernie4_5_MoeForCausalLM Exaone4ForCausalLM "
        "Gemma2ForCausalLM Gemma3ForCausalLM Gemma3ForConditionalGeneration "
        "Gemma3nForConditionalGeneration Gemma4ForCausalLM Gemma4ForConditionalGeneration "
        "Gemma4UnifiedForConditionalGeneration GemmaForCausalLM GraniteMoeHybridForCausalLM "
        "HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM InternS2PreviewForConditionalGeneration "
        "LagunaForCausalLM Llama4ForCausalLM Llama4ForConditionalGeneration MellumForCausalLM "
        "MiniMaxM2ForCausalLM NemotronHForCausalLM NemotronHPuzzleForCausalLM "
        "PaddleOCRVLForConditionalGeneration Phi4MMForCausalLM PhiForCausalLM "
        "Qwen2_5_VLForConditionalGeneration Qwen3MoeForCausalLM Qwen3NextForCausalLM "
        "Qwen3_5ForCausalLM Qwen3_5ForConditionalGeneration Qwen3_5MoeForCausalLM "
        "Qwen3_5MoeForConditionalGeneration SolarForCausalLM"
    ),
    "0.5.17": "MiniMaxM3SparseForCausalLM MiniMaxM3SparseForConditionalGeneration",
    "0.5.18": (
        "InternS2MobiusForCausalLM InternS2MobiusForConditionalGeneration MuseGlimmerForCausalLM "
        "MuseGlimmerForConditionalGeneration"
    ),
    "0.5.19": (
        "Dots3NoteForCausalLM DotsNoteOmniForConditionalGeneration KimiK3ForConditionalGeneration"
    ),
    "0.5.20": (
        "Glm5NextForConditionalGeneration HYV4ForCausalLM K2HorizonForCausalLM "
        "NemotronH_Omni_Reasoning_V3 Qwen4ExpForConditionalGeneration XllmForCausalLM"
    ),
    "0.5.21": "DiffusionGemmaForBlockDiffusion",
    "0.5.23": (
        "BeamForCausalLM MiniCPMV4_6ForConditionalGeneration MiniCPMV4_7ForConditionalGeneration "
        "MuseSparkForConditionalGeneration MuseSparkTextForCausalLM"
    ),
}
LISTS_PARTS = "class says which projections it joins (packed_modules_mapping)"
"""In other classes a list of modules has to name the joined one, `qkv_proj`."""
GROUP_FORMATS = "the format of a config group is read"
CHANNELS_ALONE = "FP8 weights alone, per channel, are not taken for packed integers"
ENDS_IGNORED = "an entry of ignore matches the end of a path, and no part of it in either case"
HEAD_COMPRESSED = "compressed-tensors quantizes the output layer"
KV_COMPRESSED = "compressed-tensors' attention has parameters for KV scales"
ZERO_UNSET = "two KV scales of zero count as not loaded"
PLAIN_NAMES = "loaders of qwen3_5 map self_attn.k_scale"
KV_PLACE = "attention of this model type has parameters for KV scales"
FUSES_FIRST = "loader of this model type renames k_proj before its scale"
NUMERICS_READ = "kernels and functions that Numerics names are those of 0.5.23"
_FACTS = (
    Fact(name=GROUP_FORMATS, since="0.5.17", source=_COMPRESSED, how=_RUN),
    Fact(name=CHANNELS_ALONE, since="0.5.22", source=_COMPRESSED, how=_RUN),
    Fact(name=ENDS_IGNORED, since="0.5.17", source="compressed_tensors/utils.py", how=_RUN),
    Fact(name=HEAD_COMPRESSED, since="0.5.19", source=f"{_COMPRESSED} get_quant_method"),
    Fact(name=KV_COMPRESSED, since="0.5.19", source=f"{_COMPRESSED} get_quant_method"),
    Fact(name=ZERO_UNSET, since="0.5.18", source="quantization/kv_cache.py"),
    Fact(name=PLAIN_NAMES, since="0.5.19", source="models/qwen3_5.py", how=_RUN),
    Fact(name=NUMERICS_READ, since="0.5.19", source="sglang/engine.py of this tool"),
    *(
        Fact(name=KV_PLACE, value=model_type, since="0.5.17", source="models/qwen3_5.py")
        for model_type in ("qwen3_5_text", "qwen3_5_moe_text")
    ),
    Fact(
        name=FUSES_FIRST,
        value="qwen3_vl_text",
        until="0.5.20",
        source="models/qwen3_vl.py",
        how=_RUN,
    ),
    Fact(
        name="mixed precision linear",
        value="FP8_PB_WO",
        since="0.5.18",
        source="modelopt_quant.py",
    ),
    Fact(
        name="mixed precision expert",
        value="FP8_PB_WO",
        since="0.5.21",
        source="modelopt_quant.py",
    ),
    *(
        Fact(name=name, value=value, since=since, source="srt/models/")
        for name, classes in (("class", _CLASSES), (LISTS_PARTS, _LISTING))
        for since, values in classes.items()
        for value in values.split()
    ),
)
RELEASES = make_releases(
    "SGLang",
    ((f"0.5.{number}", Evidence.LOADER) for number in range(23, 15, -1)),
    _FACTS,
    parts=3,
)
"""The newest first."""
NEWEST = RELEASES[0]
