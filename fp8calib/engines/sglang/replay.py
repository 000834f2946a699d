"""What SGLang does with the KV scales of a checkpoint folder.

Read in the wheels: `srt/layers/quantization/`, `maybe_remap_kv_scale_name`, and the models whose
`load_weights` calls it; the others load a scale only under the name of the parameter itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fp8calib.checkpoint.json_files import load_json
from fp8calib.checkpoint.model_config import list_classes
from fp8calib.engines.engine import SCALE_FACTOR
from fp8calib.engines.facts.release import PLACELESS, SGLANG_RELEASES, Release
from fp8calib.engines.replay.declared import (
    METHODS_FIX,
    amend_for_dtype,
    find_modelopt_section,
    find_quantization,
    note_drafter,
)
from fp8calib.engines.replay.folder import FoundScale, ScaleFolder
from fp8calib.engines.replay.loaded_scales import open_indexed
from fp8calib.engines.replay.verdicts import EngineReport, LoadVerdict, Refusal, report_alike
from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.formats.dialect import Spelling
from fp8calib.formats.kv.parse_names import parse_name
from fp8calib.model.geometry import KV_ROLES, ModelGeometry
from fp8calib.numerics.formats import NVFP4_CACHE

_CLASS = "class"
_PLAIN_FACT = "loaders of qwen3_5 map self_attn.k_scale"
_MAPS_NAMES = "loader of this model type maps the names of KV scales (maybe_remap_kv_scale_name)"
"""Its attention gets a folder's `k_scale`."""
_IS_STRICT = "loader of this model type raises an error for a name without a parameter"
_INDEXES = "loader of this model type raises a KeyError for a name that it does not map"
"""Such as q_scale."""
_FUSES_FIRST = "loader of this model type renames k_proj before its scale"
"""It raises a KeyError for a scale under a projection, which it looks for in qkv_proj (the names of
ModelOpt and Quark)."""
_MAPS_MODELOPT = "loader of this model type maps the names of ModelOpt to"
_MAPS_PLAIN = "loader of this model type maps self_attn.k_scale"
_LOSES = "loader of this model type renames every KV scale and loads none"
_WRAPPERS = "multimodal class that loads the text model's weights itself"
_CONFIG_KEYS = (
    "quantization_config",
    "text_config.quantization_config",
    "compression_config",
    "modelopt",
)
"""Where SGLang looks for the quantization config, in order."""
_STATIC_FP8 = {"type": "float", "num_bits": 8, "strategy": "tensor"}
_KV_COMPRESSED = "compressed-tensors' attention has parameters for KV scales"
_ZERO_UNSET = "two KV scales of zero count as not loaded"
_REMAPPED = (
    (re.compile(r"\.(self_attn|mixer)\.([kv])_proj\.\2_scale$"), r".\1.attn.\2_scale"),
    (re.compile(r"\.([kv])_scale$"), r".attn.\1_scale"),
    (re.compile(r"\.([qkv])_proj\.output_scale$"), r".attn.\1_scale"),
    (re.compile(r"\.kv_scale$"), ".attn.k_scale"),
)
"""`maybe_remap_kv_scale_name`: the first pattern that is found in a name is replaced."""
_PROJECTION = re.compile(r"\.[qkv]_proj\.")
_FUSED_BEFORE = {
    "gemma3n_text": (Spelling.PROJECTION, Spelling.OUTPUT),
    "minimax_m2": (Spelling.OUTPUT,),
}
"""Model types that fuse names under a projection first, and so lose scales with such names."""
_PASSING_SINGLE = ("granite", "granite_swa", "olmoe")
_NEARLY = 1e-6
_INNER = {"latent": "attn_mqa"}
"""What SGLang calls the module in an attention that has the scales, where it is not `attn`."""
_FIX = "give it the name that SGLang's loader reads ({path}.k_scale and .v_scale)"


def replay_sglang(
    release: Release, folder: ScaleFolder, geometry: ModelGeometry, _tp: int
) -> EngineReport:
    """Replay SGLang's loading of a folder, with `--kv-cache-dtype fp8_e4m3`.

    Every rank uses the same number. `Refusal` is raised where SGLang does not start.
    """
    context = open_indexed(folder, geometry, error="RuntimeError")
    fault = find_fault(folder, geometry, release)
    kinds = {layer.index: attention.kind for layer, attention in geometry.attentions()}
    modules = {layer.index: each.checkpoint_module for layer, each in geometry.attentions()}
    paths = {i: f"{module}.{_INNER.get(kinds[i], 'attn')}" for i, module in modules.items()}
    places = {
        f"{path}.{role}_scale": (index, role)
        for index, path in (paths.items() if fault is None else ())
        for role in KV_ROLES
    }
    model_type = release.find_value(_WRAPPERS, geometry.architecture) or geometry.model_type
    # a loader that maps names does not know the parameter's own
    read = modules if release.has(_MAPS_NAMES, model_type) else paths
    if has_class(folder, geometry, release):
        fix = _FIX.format(path=next(iter(read.values()), "attn"))
        if release.has(PLACELESS, geometry.model_type):
            fix = _PLACELESS_FIX
        for name, stored in context.scales.items():
            target = name_sglang_parameter(name, model_type, release)
            is_stray = target not in places
            if why := _find_error(stored, target, model_type, release, is_stray=is_stray):
                raise Refusal(f"{stored}: SGLang's {model_type} {why}", fix=fix)
    context.load(lambda name: places.get(name_sglang_parameter(name, model_type, release)))
    zero_is_unset = release.has(_ZERO_UNSET)
    layers = []
    for index, path in read.items():
        why = f"the model's loader accepts only {path}.k_scale, and warns otherwise, so it uses 1.0"
        absent = fault or (why, _FIX.format(path=path))
        layers.append(context.judge_pair(index, "SGLang", absent, zero_is_unset=zero_is_unset))
    unread = "SGLang does not read it, and does not use it to quantize the query"
    report = context.report(layers, unread=unread)
    if fault is None and geometry.has_latent_attention:
        # The cache stores latents by a plain cast (`mem_cache/memory_pool.py`, MLATokenToKVPool),
        # and `trtllm_mla_backend.py` and `flashmla_backend.py` multiply logits by k_scale.
        scaled = (slot for slot, one in report.slots.items() if one.value != 1.0)
        latents = [slot for slot in scaled if kinds[slot[0]] == "latent"]
        report = report.mark(dict.fromkeys(latents, _LATENTS), _LATENTS_FIX)
    report = note_drafter(report, geometry, release)
    doubled = "SGLang uses it as a scale for e4m3fn, and doubles it on AMD gfx94x"
    nvfp4 = ""
    if release.has("--kv-cache-dtype", NVFP4_CACHE):
        (factor,) = release.values[SCALE_FACTOR]
        nvfp4 = f"these are global scales of --kv-cache-dtype nvfp4, multiplied by {factor}"
    return amend_for_dtype(report, folder, fnuz=doubled, e5m2=_E5M2, nvfp4=nvfp4)


def has_class(folder: ScaleFolder, geometry: ModelGeometry, release: Release) -> bool:
    """Tell whether a release has the class of a model.

    Without one SGLang runs transformers' code, whose attention has no parameters of its own
    (`models/transformers.py`).
    """
    names = (geometry.architecture, *list_classes(folder.config))
    return any(release.has(_CLASS, name) for name in names)


def find_fault(
    folder: ScaleFolder, geometry: ModelGeometry, release: Release
) -> tuple[str, str] | None:
    """Say why attention has no parameters for KV scales, and what to do; None if it has."""
    why, fix = _explain_config(find_sglang_config(folder), release)
    if not why and not has_class(folder, geometry, release):
        name = geometry.architecture
        since = release.begins[_CLASS].get(name, "")
        fix = _NEWER_FIX if since else _PLACELESS_FIX
        came = f", which came with {since}," if since else ""
        why = f"{release.title} has no class {shorten(name)}{came} and loads no KV scales with"
        why = f"{why} transformers' class"
    elif not why and release.has(PLACELESS, geometry.model_type):
        owner, fix = f"{release.title}'s attention of {geometry.model_type}", _NEWER_FIX
        why = f"{owner} has no parameters for KV scales"
    if SGLANG_RELEASES[-1].has(PLACELESS, geometry.model_type):
        fix = _PLACELESS_FIX
    return (f"{why}, so it uses 1.0", fix) if why else None


def _explain_config(quantization: Mapping[str, object] | None, release: Release) -> tuple[str, str]:
    """Say why no layer has such parameters under a config, and what to do; empty if it has."""
    method = str((quantization or {}).get("quant_method", "modelopt"))
    why, fix = "", _SCHEME_FIX
    if quantization is None:
        why = "without a quantization_config no layer has parameters for KV scales"
    elif method == "compressed-tensors" and not release.has(_KV_COMPRESSED):
        since, fix = release.begins[_KV_COMPRESSED][""], _NEWER_FIX
        why = f"{release.title} loads no KV scales with quant_method {method}, which {since} does"
    elif method == "compressed-tensors":
        scheme = quantization.get("kv_cache_scheme")
        if scheme is None:
            why = "without a kv_cache_scheme no layer has parameters for KV scales"
        elif not isinstance(scheme, dict):
            raise Refusal("kv_cache_scheme is not an object", fix="write the scheme of kv-overlay")
        elif (
            not scheme.get("symmetric", True)
            or scheme.get("dynamic", False)
            or any(scheme.get(key) != value for key, value in _STATIC_FP8.items())
        ):
            kind = "static symmetric per-tensor FP8"
            why = f"kv_cache_scheme is ignored, because only {kind} is supported"
    elif method.startswith("modelopt"):
        section = find_modelopt_section(quantization)
        if section.get("quant_algo") is None:
            error = "Cannot find 'quant_algo' in the model's quantization config"
            raise Refusal(error, fix="write the scales as compressed-tensors does (kv-overlay)")
        scheme, algorithm = section.get("kv_cache_scheme"), section.get("kv_cache_quant_algo")
        if isinstance(scheme, dict):
            algorithm = (scheme.get("type"), scheme.get("num_bits")) == ("float", 8)
        # ModelOptFp4Config.from_config replaces an absent entry by "auto", which is true.
        if not algorithm and "FP4" not in str(section["quant_algo"]):
            why = "the ModelOpt config does not quantize the KV cache"
    elif method not in ("fp8", "quark", "mxfp8"):
        why, fix = f"quant_method {method[:40]!a} has no parameters for KV scales", METHODS_FIX
    return why, fix


def find_sglang_config(folder: ScaleFolder) -> Mapping[str, object] | None:
    """Find the quantization config, with the method that SGLang replaces ModelOpt's by.

    It reads MIXED_PRECISION as w4afp8, unless a layer is NVFP4 (`configs/model_config.py`,
    _parse_modelopt_quant_config).
    """
    quantization = find_quantization(folder, keys=_CONFIG_KEYS)
    if quantization is None or quantization.get("quant_method", "modelopt") != "modelopt":
        return quantization
    section = find_modelopt_section(quantization)
    layers = section.get("quantized_layers")
    listed = layers.values() if isinstance(layers, dict) else ()
    algorithms = {str(each.get("quant_algo")).upper() for each in listed if isinstance(each, dict)}
    is_mixed = bool(algorithms & {"NVFP4", "W4A16_NVFP4"})
    if section.get("quant_algo") != "MIXED_PRECISION" or is_mixed:
        return quantization
    return {**quantization, "quant_method": "w4afp8"}


def name_sglang_parameter(name: str, model_type: str, release: Release) -> str:
    """Give the name of the parameter that `load_weights` of a model looks for, or "" for none."""
    if release.has(_LOSES, model_type):
        return ""
    if release.has(_MAPS_NAMES, model_type):
        parsed = parse_name(name)
        fused = _FUSED_BEFORE.get(model_type, ())  # such a name is lost before it can be remapped
        if parsed is not None and parsed.spelling in fused:
            return name
        return next((old.sub(new, name) for old, new in _REMAPPED if old.search(name)), name)
    maps_plain = release.has(_PLAIN_FACT) and release.has(_MAPS_PLAIN, model_type)
    inner = release.find_value(_MAPS_MODELOPT, model_type)
    for role in KV_ROLES:
        modelopt, plain = f".{role}_proj.{role}_scale", f".self_attn.{role}_scale"
        if inner and name.endswith(modelopt):
            return f"{name.removesuffix(modelopt)}.{inner}.{role}_scale"
        if maps_plain and name.endswith(plain):
            return f"{name.removesuffix(plain)}.self_attn.attn.{role}_scale"
    return name


def _find_error(
    stored: FoundScale, target: str, model_type: str, release: Release, *, is_stray: bool
) -> str:
    """Say why a model's loader raises an error for a scale; empty if it does not.

    `target` is what it calls the parameter; `is_stray`: the model has none of that name.
    """
    name, is_next = stored.name, model_type == "qwen3_next"
    asserts = is_next and not release.has(PLACELESS, model_type)  # that it is 1.0
    is_passed = model_type in _PASSING_SINGLE and name.endswith(".kv_scale")
    if is_next and "mtp" in name:
        is_passed = True
    elif asserts:
        is_passed = len(stored.values) == 1 and abs(stored.values[0] - 1.0) < _NEARLY
    if is_stray and release.has(_IS_STRICT, model_type) and not is_passed:
        return f"has no such parameter ({'AssertionError' if asserts else 'KeyError'})"
    if is_stray and target == name and release.has(_INDEXES, model_type):
        return "has no such parameter (KeyError)"
    is_fused = release.has(_FUSES_FIRST, model_type) and _PROJECTION.search(name)
    return "looks for it in qkv_proj (KeyError)" if is_fused else ""


_E5M2 = "an fp8_e4m3 cache multiplies by a scale that was made for e5m2"
_LATENTS = "SGLang stores latents unscaled; TRT-LLM and FlashMLA multiply the logits by k_scale"
_LATENTS_FIX = "serve it without scales, or with scales of 1.0"
_SCHEME_FIX = "write the kv_cache_scheme of kv-overlay: static, symmetric, per tensor"
_NEWER_FIX = "serve it with a newer release, or without scales"
_PLACELESS_FIX = "serve it with another engine, or without scales"
_READS_FILE = "class of this model type reads a file of scales"
_DIVIDES = (
    "SGLang divides K and V by the scale where it stores them, and does not multiply where it "
    "reads them: FlashInfer attends to the quotients, FlashAttention, Triton and TRT-LLM fail"
)


def replay_json(
    release: Release, path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder
) -> EngineReport:
    """Say what SGLang does with `--quantization-param-path`; `Refusal` where it stops.

    Its models set `k_scale` and `v_scale` of a layer to the number (`models/llama.py`,
    load_kv_cache_scales), by which `mem_cache/memory_pool.py` (MHATokenToKVPool.set_kv_buffer)
    divides K and V. Attention multiplies by `k_scale_float` and `v_scale_float`, which stay None:
    `flashinfer_backend.py` (FlashInferAttnBackend.forward_decode) takes None for 1.0, `sm_scale *
    k_scale` of `triton_backend.py` and `k_scale.expand` of `flashattention_backend.py` are errors,
    and so is `.to` of `fused_fp8_qkv_kv_cache.py` (_scale_to_f32), which `trtllm_mha_backend.py`
    calls. Read in 0.5.16 and 0.5.23; `aiter_backend.py` passes the number to kernels that were not
    read.

    The loader is vLLM's of 0.4 to 0.6 (`srt/model_loader/weight_utils.py`: `QuantParamSchema`,
    `kv_cache_scales_loader`). Where anything in a file is wrong, all scales are 1.0, and one line
    in the log says so; of that, only another form or number of ranks is looked for here.
    """
    # multimodal classes read none
    is_wrapped = geometry.is_wrapped and geometry.model_type != "glm5_next"
    has_own = has_class(model, geometry, release) and not is_wrapped
    fix = "serve a kv-overlay instead"
    if not has_own or not release.has(_READS_FILE, geometry.model_type):
        model_type = release.find_value(_WRAPPERS, geometry.architecture) or geometry.model_type
        owner = f"{release.title}'s {model_type}"
        raise Refusal(f"{owner} reads no file of scales: RuntimeError at start", fix=fix)
    document = load_json(path)
    cache = document.get("kv_cache") if isinstance(document, dict) else None
    ranks = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(ranks, dict) or ranks.keys() != {str(rank) for rank in range(tp)}:
        why = f"SGLang looks for ranks 0 to {tp - 1} in kv_cache.scaling_factor, else it uses 1.0"
        verdict = LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=fix)
        return report_alike(geometry, verdict)
    if find_fault(model, geometry, release) is None:
        why = "the model's quantization_config makes k_scale a parameter: setting it is a TypeError"
        raise Refusal(why, fix="store the scales in the checkpoint")
    return report_alike(geometry, LoadVerdict(status=Status.MISREAD, why=_DIVIDES, fix=fix))
