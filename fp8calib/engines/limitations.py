"""Who cannot honour which form, as data; every rule names its source."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fp8calib.engines.models import (
    SGLANG_MAPPING_TYPES,
    SGLANG_OWN_MAPPINGS,
    SGLANG_STRICT_TYPES,
    TGI_TYPES,
    TRANSFORMERS_REBUILT_TYPES,
    TRANSFORMERS_UNEXPECTED_TYPES,
    VLLM_PLACELESS_TYPES,
    VLLM_UNRUN_TYPES,
    find_sglang_type,
    takes_sglang_json,
)
from fp8calib.fp8.formats import E4M3FN, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry

VLLM = "vLLM"
OLD_VLLM = "vLLM 0.4-0.6"
SGLANG = "SGLang"
TGI = "TGI"
TRANSFORMERS = "transformers"

OVERLAYS = ("kv-overlay", "kv-overlay-head")
REBUILT = (
    "the experts are made anew under any quantization_config and their weights reported MISSING: "
    "they are random numbers"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """Why an engine cannot honour a file, or under which condition alone it does."""

    engine: str
    why: str
    source: str
    is_blocking: bool
    """The engine cannot use the scales at all; otherwise `why` is a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What a limitation can depend on."""

    geometry: ModelGeometry
    fmt: Fp8Format
    query: bool

    @property
    def has_several_kv_heads(self) -> bool:
        """Whether any layer caches more than one head."""
        return any(a.num_kv_heads > 1 for _, a in self.geometry.attentions())

    @property
    def has_shared_cache(self) -> bool:
        """Whether any layer reads the K and V of another one."""
        return any(a.producer is not None for _, a in self.geometry.attentions())


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A limitation, the formats it is about, and when it applies."""

    limitation: Limitation
    formats: tuple[str, ...]
    applies: Callable[[Case], bool]


def _always(_: Case) -> bool:
    return True


def _is_latent(case: Case) -> bool:
    return case.geometry.has_latent_attention


def _is_fnuz(case: Case) -> bool:
    return case.fmt is not E4M3FN


def _is_type(*model_types: str) -> Callable[[Case], bool]:
    return lambda case: case.geometry.model_type in model_types


def _is_not_type(*model_types: str) -> Callable[[Case], bool]:
    return lambda case: case.geometry.model_type not in model_types


def _blocked(
    engine: str, formats: tuple[str, ...], applies: Callable[[Case], bool], why: str, source: str
) -> Rule:
    limitation = Limitation(engine=engine, why=why, source=source, is_blocking=True)
    return Rule(limitation=limitation, formats=formats, applies=applies)


def _limited(
    engine: str, formats: tuple[str, ...], applies: Callable[[Case], bool], why: str, source: str
) -> Rule:
    limitation = Limitation(engine=engine, why=why, source=source, is_blocking=False)
    return Rule(limitation=limitation, formats=formats, applies=applies)


_SGLANG_TOLD = (
    *SGLANG_MAPPING_TYPES,
    *SGLANG_STRICT_TYPES,
    *(name for name, ends in SGLANG_OWN_MAPPINGS.items() if ".self_attn.k_scale" in ends),
)

RULES = (
    # --- overlays ----------------------------------------------------------------------------
    _blocked(
        VLLM,
        OVERLAYS,
        _is_latent,
        "under compressed-tensors no KV scale reaches latent (MLA) attention: 1.0 is used",
        "vLLM 0.32.0 quantization/compressed_tensors (CompressedTensorsKVCacheMethod)",
    ),
    _blocked(
        VLLM,
        (*OVERLAYS, "kv-scales"),
        _is_type(*VLLM_UNRUN_TYPES),
        "it does not run this kind of model (any more)",
        "vLLM 0.32.0 models/registry.py; tried",
    ),
    _blocked(
        VLLM,
        (*OVERLAYS, "kv-scales"),
        _is_type(*VLLM_PLACELESS_TYPES),
        "its attention of this kind of model has no place for scales: ValueError at load",
        "vLLM 0.32.0 models/jamba.py, lfm2.py, lfm2_moe.py, zamba2.py (Attention)",
    ),
    _limited(
        VLLM,
        ("kv-overlay-head",),
        _always,
        "per-head scales need FlashAttention 3 or later; on a CPU the largest of a layer serves "
        "all its heads",
        "vLLM 0.32.0 quantization/compressed_tensors, v1/attention/backends/cpu_attn.py",
    ),
    _limited(
        VLLM,
        OVERLAYS,
        lambda case: not _is_fnuz(case),
        "on AMD gfx94x (MI300) these scales are not doubled, so values above 240/448 of the "
        "calibrated range clip; `calibrate --fp8-dtype e4m3fnuz` writes a kv-overlay for it",
        "vLLM 0.32.0 CompressedTensorsKVCacheMethod overrides the doubling of BaseKVCacheMethod",
    ),
    _limited(
        VLLM,
        OVERLAYS,
        _is_fnuz,
        "fnuz scales are meant for AMD gfx94x; elsewhere the cache is e4m3fn and they waste half "
        "its range",
        "vLLM 0.32.0 CompressedTensorsKVCacheMethod",
    ),
    _blocked(
        SGLANG,
        ("kv-overlay-head",),
        lambda case: case.has_several_kv_heads,
        "only per-tensor scales are taken",
        "SGLang 0.5.23 CompressedTensorsKVCacheMethod",
    ),
    _blocked(
        SGLANG,
        (*OVERLAYS, "kv-scales"),
        lambda case: _is_latent(case) or find_sglang_type(case.geometry) not in _SGLANG_TOLD,
        "its loader of this kind of model maps no k_scale to the attention: 1.0 is used",
        "SGLang 0.5.23 srt/models (callers of maybe_remap_kv_scale_name)",
    ),
    _blocked(
        SGLANG,
        (*OVERLAYS, "kv-scales"),
        lambda case: find_sglang_type(case.geometry) in SGLANG_STRICT_TYPES,
        "its loader of this kind of model stops at k_scale: KeyError, or AssertionError, at start",
        "SGLang 0.5.23 srt/models (load_weights)",
    ),
    _limited(
        SGLANG,
        OVERLAYS,
        _is_fnuz,
        "on AMD gfx94x the KV scales of a checkpoint are doubled as if they were for e4m3fn",
        "SGLang 0.5.23 srt/layers/quantization/kv_cache.py",
    ),
    _blocked(
        TGI,
        ("kv-overlay-head",),
        lambda case: case.has_several_kv_heads,
        "a scale of more than one element is a ValueError",
        "TGI db931fc layers/attention/kv_cache.py (get_kv_scales)",
    ),
    _blocked(
        TGI,
        (*OVERLAYS, "tgi"),
        _is_not_type(*TGI_TYPES),
        "its model of this type does not ask for KV scales",
        "TGI db931fc models/custom_modeling (callers of get_kv_scales)",
    ),
    _blocked(
        TGI,
        (*OVERLAYS, "tgi"),
        _is_latent,
        "it caches K and V expanded to heads, not the latents the scales were made for",
        "TGI db931fc models/custom_modeling/flash_deepseek_v2_modeling.py",
    ),
    _limited(
        TGI,
        (*OVERLAYS, "tgi"),
        _is_fnuz,
        "the cache is e4m3fn, and fnuz scales waste half its range",
        "TGI db931fc layers/attention/kv_cache.py",
    ),
    _blocked(
        TRANSFORMERS,
        OVERLAYS,
        _is_type("opt"),
        "loading is a ValueError: the config has no num_key_value_heads",
        "compressed-tensors 0.20 utils (get_num_kv_heads)",
    ),
    _blocked(
        TRANSFORMERS,
        OVERLAYS,
        _is_type(*TRANSFORMERS_UNEXPECTED_TYPES),
        "the scales are reported as unexpected, and the cache is not quantized",
        "compressed-tensors 0.20 modeling/kvcache.py, transformers 5.23",
    ),
    _blocked(
        TRANSFORMERS,
        OVERLAYS,
        _is_type(*TRANSFORMERS_REBUILT_TYPES),
        REBUILT,
        "transformers 5.23 quantizers/base.py (SequentialLlama4TextExperts)",
    ),
    _blocked(
        TRANSFORMERS,
        ("kv-overlay-head",),
        _is_latent,
        "loading is a RuntimeError: a scale for each of num_key_value_heads is expected, and the "
        "latent has one",
        "compressed-tensors 0.20 quantization/lifecycle/initialize.py",
    ),
    _limited(
        TRANSFORMERS,
        OVERLAYS,
        lambda case: case.has_shared_cache,
        "scales of layers that read another layer's K and V are reported as unexpected; those of "
        "the layers that write the cache are used",
        "transformers 5.23, tried with gemma3n",
    ),
    *(
        _limited(
            engine,
            (*OVERLAYS, "kv-scales"),
            lambda case: case.query,
            "q_scale is not read; k_scale and v_scale are",
            source,
        )
        for engine, source in (
            (SGLANG, "SGLang 0.5.23 srt/layers/quantization/kv_cache.py"),
            (TGI, "TGI db931fc layers/attention/kv_cache.py (get_kv_scales)"),
            (TRANSFORMERS, "transformers 5.23: reported as unexpected"),
        )
    ),
    # --- tgi ---------------------------------------------------------------------------------
    _blocked(
        VLLM,
        ("tgi",),
        _always,
        "scales without a quantization_config are a ValueError at load",
        "vLLM 0.32.0 model_executor/models/utils.py (AutoWeightsLoader)",
    ),
    _blocked(
        SGLANG,
        ("tgi",),
        _always,
        "without a quantization_config no layer has a place for the scales: 1.0 is used",
        "SGLang srt/model_loader/weight_utils.py (maybe_remap_kv_scale_name)",
    ),
    _limited(
        TGI,
        ("tgi",),
        _always,
        "kv_scale is rounded to the model's dtype first; kv_cache_torch_dtype is read only by the "
        "branch of pull request 2028",
        "TGI db931fc layers/attention/kv_cache.py (get_kv_scales)",
    ),
    _blocked(
        TRANSFORMERS,
        ("tgi",),
        _always,
        "the scales are reported as unexpected, and the cache is not quantized",
        "transformers 5.23",
    ),
    # --- kv-scales ---------------------------------------------------------------------------
    _blocked(
        VLLM,
        ("kv-scales",),
        _is_type("gpt2"),
        "its GPT-2 refuses attn.k_scale beside attn.attn.k_scale; write kv-overlay",
        "vLLM 0.32.0 model_executor/models/gpt2.py",
    ),
    *(
        _limited(
            engine,
            ("kv-scales",),
            _always,
            "it is read only inside a model folder without model.safetensors.index.json whose "
            "config.json has the quantization_config of kv-overlay",
            source,
        )
        for engine, source in (
            (VLLM, "vLLM 0.32.0 model_loader/default_loader.py"),
            (SGLANG, "SGLang 0.5.23 srt/model_loader/weight_utils.py"),
        )
    ),
    _limited(
        TGI,
        ("kv-scales",),
        _always,
        "it is read only inside the model's folder",
        "TGI db931fc utils/hub.py (_weight_files_from_dir)",
    ),
    _blocked(
        TRANSFORMERS,
        ("kv-scales",),
        _always,
        "a file that is neither model.safetensors nor in the index is not read",
        "transformers 5.23 modeling_utils.py",
    ),
    # --- JSON --------------------------------------------------------------------------------
    _blocked(
        VLLM,
        ("vllm-json",),
        _always,
        "since 0.7 there is no --quantization-param-path any more",
        "vLLM pull request 11906",
    ),
    _limited(
        OLD_VLLM,
        ("vllm-json",),
        lambda case: case.geometry.model_type != "llama",
        "its documentation promises the scales file for Llama 2 only",
        "vLLM 0.4 examples/fp8/README.md",
    ),
    _blocked(
        SGLANG,
        ("vllm-json",),
        lambda case: not takes_sglang_json(case.geometry),
        "its model of this type takes no scales file: RuntimeError at start",
        "SGLang 0.5.23 srt/models (load_kv_cache_scales)",
    ),
    _limited(
        SGLANG,
        ("vllm-json",),
        lambda case: takes_sglang_json(case.geometry),
        "the file is parsed, but what the scales do depends on the attention backend; kv-overlay "
        "is the sturdier form",
        "SGLang issues 20705 and 18818",
    ),
    *(
        _blocked(
            engine,
            ("vllm-json",),
            _is_fnuz,
            "a dtype other than float8_e4m3fn is refused: 1.0 is used for every layer",
            f"{source} (KVCacheQuantSchema)",
        )
        for engine, source in (
            (OLD_VLLM, "vLLM quantization/schema.py"),
            (SGLANG, "SGLang 0.5.23 srt/model_loader/weight_utils.py"),
        )
    ),
    *(
        _blocked(engine, ("vllm-json", "rfc"), _always, "it reads no JSON of scales", source)
        for engine, source in ((TGI, "TGI db931fc"), (TRANSFORMERS, "transformers 5.23"))
    ),
    *(
        _blocked(
            engine,
            ("rfc",),
            _always,
            "no release ever read the RFC's form; rank keys such as rank0 are refused",
            source,
        )
        for engine, source in (
            (VLLM, "vLLM 0.32.0; pull request 11906"),
            (OLD_VLLM, "vLLM quantization/schema.py (QuantParamSchema)"),
            (SGLANG, "SGLang 0.5.23 srt/model_loader/weight_utils.py"),
        )
    ),
)
