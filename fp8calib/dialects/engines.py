"""Which engine reads which form, the command that serves it, and who cannot honour it.

Every limitation names its source: the engine's version and file, or the public thread.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fp8calib.fp8 import E4M3FN, Fp8Format
from fp8calib.geometry import ModelGeometry

VLLM = "vLLM"
OLD_VLLM = "vLLM 0.4-0.6"
SGLANG = "SGLang"
TGI = "TGI"
TRANSFORMERS = "transformers"

_OVERLAYS = ("kv-overlay", "kv-overlay-head")
_CACHE_DTYPE_BYTES = 1
_DTYPE_BYTES = {"float64": 8, "float32": 4}
_SERVED_BYTES = 2

SGLANG_JSON_TYPES = frozenset(
    "llama qwen2 qwen3 mimo mimo_v2 opt glm4 glm5_next hunyuan exaone4 solar arcee apertus "
    "mistral phi3".split()
)
"""Model types whose classes have `load_kv_cache_scales` (SGLang 0.5.23 `srt/models/`); mistral and
phi3 are subclasses of llama's."""
TGI_TYPES = frozenset(
    "llama mistral mixtral qwen2 gemma gemma2 gemma3 gemma3_text phi phi3 cohere dbrx deepseek_v2 "
    "deepseek_v3 gpt_neox gpt2 gptj RefinedWeb RefinedWebModel falcon gpt_bigcode starcoder2 "
    "granite".split()
)
"""Model types whose modeling files call `get_kv_scales` (TGI db931fc); phi3 and granite are run by
llama's."""
TRANSFORMERS_UNEXPECTED_TYPES = frozenset({"gpt2", "gpt_neox", "falcon", "bloom", "gptj", "mpt"})
"""Model types where compressed-tensors finds no attention to put scales on (tried on 5.23)."""


@dataclass(frozen=True, slots=True)
class ServingCommand:
    """The command line that serves a file with an engine."""

    engine: str
    command: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Limitation:
    """Why an engine cannot honour a file, or under which condition alone it does."""

    engine: str
    why: str
    source: str
    is_blocking: bool
    """The engine cannot use the scales at all; otherwise `why` is a condition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    geometry: ModelGeometry
    fmt: Fp8Format
    query: bool

    @property
    def has_several_kv_heads(self) -> bool:
        return any(a.num_kv_heads > 1 for _, a in self.geometry.attentions())

    @property
    def has_shared_cache(self) -> bool:
        return any(a.producer is not None for _, a in self.geometry.attentions())


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    limitation: Limitation
    formats: tuple[str, ...]
    applies: Callable[[_Case], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    engine: str
    formats: tuple[str, ...]
    command: str
    ranks_flag: str


_LAUNCHERS = (
    _Launcher(
        engine=VLLM,
        formats=_OVERLAYS,
        command="vllm serve {target} --kv-cache-dtype fp8",
        ranks_flag="--tensor-parallel-size",
    ),
    _Launcher(
        engine=SGLANG,
        formats=_OVERLAYS,
        command="python -m sglang.launch_server --model-path {target} --kv-cache-dtype fp8_e4m3",
        ranks_flag="--tp-size",
    ),
    _Launcher(
        engine=TGI,
        formats=(*_OVERLAYS, "tgi"),
        command="text-generation-launcher --model-id {target} --kv-cache-dtype fp8_e4m3fn",
        ranks_flag="--num-shard",
    ),
    _Launcher(
        engine=SGLANG,
        formats=("vllm-json",),
        command="python -m sglang.launch_server --model-path {model} --kv-cache-dtype fp8_e4m3 "
        "--quantization-param-path {target}",
        ranks_flag="--tp-size",
    ),
    _Launcher(
        engine=OLD_VLLM,
        formats=("vllm-json",),
        command="python -m vllm.entrypoints.openai.api_server --model {model} --kv-cache-dtype fp8 "
        "--quantization-param-path {target}",
        ranks_flag="--tensor-parallel-size",
    ),
)


def serving_commands(
    geometry: ModelGeometry,
    format_name: str,
    target: Path,
    *,
    model: str,
    fmt: Fp8Format = E4M3FN,
    tp: int = 1,
) -> list[ServingCommand]:
    """List the command for every engine that can use the file, in no case with blocking limits.

    Args:
        geometry: the shape of the model.
        format_name: the form, a name of the registry.
        target: the overlay's folder, or the file.
        model: the model as the user named it, for forms that lie beside it.
        fmt: the FP8 format the scales are for.
        tp: the number of ranks to serve with.
    """
    blocked = {
        limit.engine for limit in limitations(geometry, format_name, fmt) if limit.is_blocking
    }
    names = {"target": shlex.quote(str(target)), "model": shlex.quote(model)}
    return [
        ServingCommand(
            launcher.engine,
            launcher.command.format(**names) + (f" {launcher.ranks_flag} {tp}" if tp > 1 else ""),
        )
        for launcher in _LAUNCHERS
        if format_name in launcher.formats and launcher.engine not in blocked
    ]


def limitations(
    geometry: ModelGeometry, format_name: str, fmt: Fp8Format, *, query: bool = False
) -> list[Limitation]:
    """List every engine that cannot honour a file, and the conditions of those that can.

    Args:
        geometry: the shape of the model.
        format_name: the form, a name of the registry.
        fmt: the FP8 format the scales are for.
        query: whether the file holds `q_scale`.
    """
    case = _Case(geometry=geometry, fmt=fmt, query=query)
    return [
        rule.limitation for rule in _RULES if format_name in rule.formats and rule.applies(case)
    ]


def kv_bytes_per_token(geometry: ModelGeometry) -> tuple[int, int]:
    """Give the bytes of KV cache per token over all layers and ranks, before and in FP8."""
    size = _DTYPE_BYTES.get(geometry.checkpoint_dtype, _SERVED_BYTES)
    elements = geometry.kv_elements_per_token
    return elements * size, elements * _CACHE_DTYPE_BYTES


def _always(_: _Case) -> bool:
    return True


def _is_latent(case: _Case) -> bool:
    return case.geometry.has_latent_attention


def _is_fnuz(case: _Case) -> bool:
    return case.fmt is not E4M3FN


def _is_type(*model_types: str) -> Callable[[_Case], bool]:
    return lambda case: case.geometry.model_type in model_types


def _is_not_type(model_types: frozenset[str]) -> Callable[[_Case], bool]:
    return lambda case: case.geometry.model_type not in model_types


def _blocked(
    engine: str, formats: tuple[str, ...], applies: Callable[[_Case], bool], why: str, source: str
) -> _Rule:
    limitation = Limitation(engine=engine, why=why, source=source, is_blocking=True)
    return _Rule(limitation=limitation, formats=formats, applies=applies)


def _limited(
    engine: str, formats: tuple[str, ...], applies: Callable[[_Case], bool], why: str, source: str
) -> _Rule:
    limitation = Limitation(engine=engine, why=why, source=source, is_blocking=False)
    return _Rule(limitation=limitation, formats=formats, applies=applies)


_RULES = (
    # --- overlays ----------------------------------------------------------------------------
    _blocked(
        VLLM,
        _OVERLAYS,
        _is_latent,
        "under compressed-tensors no KV scale reaches latent (MLA) attention: 1.0 is used",
        "vLLM 0.32.0 quantization/compressed_tensors (CompressedTensorsKVCacheMethod)",
    ),
    _limited(
        VLLM,
        _OVERLAYS,
        _is_type("gpt_neox"),
        "there is no native GPT-NeoX model file; its Transformers backend is untried with scales",
        "vLLM 0.32.0 model_executor/models",
    ),
    _limited(
        VLLM,
        ("kv-overlay-head",),
        _always,
        "per-head scales need FlashAttention 3 or later",
        "vLLM 0.32.0 quantization/compressed_tensors",
    ),
    _limited(
        VLLM,
        _OVERLAYS,
        lambda case: not _is_fnuz(case),
        "on AMD gfx94x (MI300) these scales are not doubled, so values above 240/448 of the "
        "calibrated range clip; write --fp8-dtype e4m3fnuz for it",
        "vLLM 0.32.0 CompressedTensorsKVCacheMethod overrides the doubling of BaseKVCacheMethod",
    ),
    _limited(
        VLLM,
        _OVERLAYS,
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
    _limited(
        SGLANG,
        _OVERLAYS,
        _is_latent,
        "untried with latent (MLA) attention",
        "FORMATS.md 1.i",
    ),
    _limited(
        SGLANG,
        _OVERLAYS,
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
        (*_OVERLAYS, "tgi"),
        _is_not_type(TGI_TYPES),
        "its model of this type does not ask for KV scales",
        "TGI db931fc models/custom_modeling (callers of get_kv_scales)",
    ),
    _blocked(
        TGI,
        (*_OVERLAYS, "tgi"),
        _is_latent,
        "it caches K and V expanded to heads, not the latents the scales were made for",
        "TGI db931fc models/custom_modeling/flash_deepseek_v2_modeling.py",
    ),
    _limited(
        TGI,
        (*_OVERLAYS, "tgi"),
        _is_fnuz,
        "the cache is e4m3fn, and fnuz scales waste half its range",
        "TGI db931fc layers/attention/kv_cache.py",
    ),
    _blocked(
        TRANSFORMERS,
        _OVERLAYS,
        _is_type("opt"),
        "loading is a ValueError: the config has no num_key_value_heads",
        "compressed-tensors 0.20 utils (get_num_kv_heads)",
    ),
    _blocked(
        TRANSFORMERS,
        _OVERLAYS,
        _is_type(*sorted(TRANSFORMERS_UNEXPECTED_TYPES)),
        "the scales are reported as unexpected, and the cache is not quantized",
        "compressed-tensors 0.20 modeling/kvcache.py, transformers 5.23",
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
        _OVERLAYS,
        lambda case: case.has_shared_cache,
        "scales of layers that read another layer's K and V are reported as unexpected; those of "
        "the layers that write the cache are used",
        "transformers 5.23, tried with gemma3n",
    ),
    *(
        _limited(
            engine,
            (*_OVERLAYS, "kv-scales"),
            lambda case: case.query,
            "q_scale is not read; k_scale and v_scale are",
            source,
        )
        for engine, source in (
            (SGLANG, "FORMATS.md 1.iii: only vLLM loads q_scale"),
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
        _is_not_type(SGLANG_JSON_TYPES),
        "its model of this type takes no scales file: RuntimeError at start",
        "SGLang 0.5.23 srt/models (load_kv_cache_scales)",
    ),
    _limited(
        SGLANG,
        ("vllm-json",),
        _is_type(*sorted(SGLANG_JSON_TYPES)),
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
        _blocked(engine, ("vllm-json",), _always, "it reads no JSON of scales", source)
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
            (TGI, "TGI db931fc"),
            (TRANSFORMERS, "transformers 5.23"),
        )
    ),
)
