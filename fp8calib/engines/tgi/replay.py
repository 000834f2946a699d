"""What TGI does with the KV scales of a checkpoint folder, as read in its source.

`layers/attention/kv_cache.py:get_kv_scales`, `utils/hub.py:_weight_files_from_dir`,
`layers/compressed_tensors/loader.py`, `utils/quantization.py:get_loader`; served with
`--kv-cache-dtype fp8_e4m3fn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fp8calib.dialects.fp8.compressed_tensors import MX_FORMAT
from fp8calib.dialects.kv.parse_names import parse_name
from fp8calib.engines.replay.folder import ScaleFolder, StoredScale
from fp8calib.engines.replay.load_context import LoadContext, require_readable
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.recorded_dtype import amend_for_dtype
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    judge_number,
)
from fp8calib.engines.status import Status
from fp8calib.engines.tgi.numerics import NUMERICS
from fp8calib.engines.weights.weight_rule import SKIPPED_WORDS
from fp8calib.errors import shorten
from fp8calib.geometry.model_geometry import Attention, ModelGeometry

_TYPES_WITH_KV_SCALES = (
    *("llama", "mistral", "mixtral", "qwen2", "gemma", "gemma2", "gemma3", "gemma3_text", "phi"),
    *("phi3", "cohere", "dbrx", "deepseek_v2", "deepseek_v3", "gpt_neox", "gpt2", "gptj"),
    *("RefinedWeb", "RefinedWebModel", "falcon", "gpt_bigcode", "starcoder2", "granite"),
)
"""Model types whose modeling files call `get_kv_scales` (TGI db931fc); llama's file runs phi3 and
granite."""
_LOADABLE = {
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("int", 8): ("pack-quantized", "int-quantized", "naive-quantized", "marlin-24"),
    ("int", 4): ("pack-quantized", "marlin-24"),
}
"""For the type and bits of a group's weights: the formats `_create_loader_for_group` knows."""
_UNLOADABLE_METHODS = ("bitsandbytes", "mxfp4", "torchao", "quanto")
"""Methods whose stored weights no loader of `get_loader` reads; with bitsandbytes TGI quantizes an
unquantized model itself."""
_OWN_LOADERS = ("compressed-tensors", "gptq", "awq", "exl2")
_UNPARSED = "Cannot parse compressed-tensors configuration"
_GROUPS_FIX = "write config_groups as an object of groups with targets, and ignore as a list"
_UNQUANTIZED = "use the unquantized model"
_NAMES_FIX = "store k_scale and v_scale under the attention module's own path"
_ROUNDED = (
    "kv_scale is rounded to {}, in which TGI serves this model without --dtype; k_scale and "
    "v_scale are not"
)


def replay_tgi(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay TGI's loading of a folder.

    Raises:
        Refusal: TGI does not start.
    """
    del tp  # every rank uses the same number
    files = [file for file in folder.files if not any(word in file for word in SKIPPED_WORDS)]
    require_readable(folder, files)
    _refuse_doubled(folder, files)
    quantization = find_quantization(folder, keys=("quantization_config", "compression_config"))
    if quantization is not None and quantization.get("quant_method") == "compressed-tensors":
        _check_compressed(quantization, geometry)
    method = None if quantization is None else quantization.get("quant_method")
    if method in _UNLOADABLE_METHODS:
        why = f"TGI has no loader for the weights of a checkpoint of quant_method {method}"
        raise Refusal(why, fix=_UNQUANTIZED)
    if quantization is not None and method not in _OWN_LOADERS:
        _require_weights(folder, files, geometry, method)
    context = LoadContext(folder, geometry, files)
    layers = [_judge(context, layer.index, attention) for layer, attention in geometry.attentions()]
    context.note_unread("TGI does not load it")
    if "kv_cache_torch_dtype" in folder.config:
        context.problems.append(
            "kv_cache_torch_dtype is read only by the branch of pull request 2028"
        )
    report = context.report(layers)
    return amend_for_dtype(report, folder, fnuz=_FNUZ, e5m2=_E5M2)


_FNUZ = "TGI does not convert KV scales, and its cache is e4m3fn: twice too large"
_E5M2 = "TGI ignores scales with an fp8_e5m2 cache"


def _refuse_doubled(folder: ScaleFolder, files: list[str]) -> None:
    stored: dict[str, str] = {}
    for file in files:
        for name in folder.tensors[file]:
            if name in stored:
                why = f"{shorten(name)} is in {stored[name]} and in {file}: RuntimeError"
                raise Refusal(why, fix="TGI opens every file, index or not: remove one of them")
            stored[name] = file


def _require_weights(
    folder: ScaleFolder, files: list[str], geometry: ModelGeometry, method: object
) -> None:
    """Replay `HybridFP8UnquantLoader`, which reads `.weight` of each linear, FP8 or unquantized."""
    stored = {name for file in files for name in folder.tensors[file]}
    modules = {name.rpartition(".")[0] for name in stored if parse_name(name) is None}
    for module in _list_linears(geometry):
        if module in modules and f"{module}.weight" not in stored:
            what = f"there is no {shorten(module)}.weight"
            raise Refusal(
                f"TGI has no loader for quant_method {method!a:.40}: {what}", fix=_UNQUANTIZED
            )


def _check_compressed(quantization: Mapping[str, object], geometry: ModelGeometry) -> None:
    """Replay `CompressedTensorsLoader`: every linear must be ignored or in a supported group."""
    groups, ignore = quantization.get("config_groups"), quantization.get("ignore") or []
    if not isinstance(groups, dict) or not isinstance(ignore, list):
        raise Refusal(f"{_UNPARSED}: config_groups or ignore", fix=_GROUPS_FIX)
    if quantization.get("quantization_status") not in ("compressed", "frozen"):
        raise Refusal(
            "Model quantization was not finished: quantization_status",
            fix='write "quantization_status": "compressed"',
        )
    targets = [*ignore]
    for name, group in groups.items():
        targets += _list_targets(name, group, quantization.get("format"))
    for module in _list_linears(geometry):
        if not any(matches_target(target, module, "Linear") for target in targets):
            why = f"Cannot find compressed-tensors target for prefix: {module}"
            raise Refusal(why, fix='"ignore": ["re:.*"] leaves every module unquantized')


def _list_targets(name: str, group: object, form: object) -> list[object]:
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list):
        raise Refusal(f"{_UNPARSED}: group {name!a:.40}", fix=_GROUPS_FIX)
    if form not in _find_formats(weights):
        why = f"Group {name!a:.40} has unsupported compressed-tensors configuration: format is "
        fix = 'leave config_groups empty, or give a float group "format": "naive-quantized"'
        if form == MX_FORMAT:
            fix = "write another scheme"
        raise Refusal(f"{why}{form!a:.40}", fix=fix)
    return targets


def _find_formats(weights: object) -> tuple[str, ...]:
    """List the formats in which TGI loads such weights."""
    if not isinstance(weights, dict):
        return ()
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    return next((formats for known, formats in _LOADABLE.items() if known == kind), ())


def _list_linears(geometry: ModelGeometry) -> Iterator[str]:
    for _, linear in geometry.linears():
        if not linear.num_experts:
            yield (linear.checkpoint_name or f"{linear.module}.weight").removesuffix(".weight")


def _judge(context: LoadContext, index: int, attention: Attention) -> LayerVerdict:
    prefix, model_type = attention.checkpoint_module, context.geometry.model_type
    if model_type not in _TYPES_WITH_KV_SCALES:
        why = f"TGI's {model_type} does not load KV scales, so it uses 1.0"
        return context.judge_absent_layer(index, why=why, fix="serve it with another engine")
    k, v, single = (context.scales.get(f"{prefix}.{name}_scale") for name in ("k", "v", "kv"))
    if k is not None and v is not None:
        return _judge_pair(context, index, attention, (k, _number(k)), (v, _number(v)))
    if single is not None:
        dtype = NUMERICS.find_joint_dtype(model_type)
        context.problems.append(_ROUNDED.format(dtype))
        rounded = float(torch.tensor(_number(single)).to(getattr(torch, dtype)))
        number = (single, rounded)
        return _judge_pair(context, index, attention, number, number)
    why = f"TGI looks only for both {prefix}.k_scale and .v_scale, or for .kv_scale, so it uses 1.0"
    return context.judge_absent_layer(index, why=why, fix=_NAMES_FIX)


def _number(stored: StoredScale) -> float:
    if stored.numel != 1:
        why = (
            f"{stored} has shape {list(stored.shape)}: Key and value scales must be scalar tensors"
        )
        raise Refusal(why, fix="store one number for the layer")
    return stored.values[0]


def _judge_pair(
    context: LoadContext,
    index: int,
    attention: Attention,
    k: tuple[StoredScale, float],
    v: tuple[StoredScale, float],
) -> LayerVerdict:
    fault = ""
    if attention.kind == "latent":
        fault = "TGI caches K and V expanded to heads, but the scales are for the latents"
    if k[1] == v[1] == 1.0:
        context.problems.append("TGI casts without clamping where both scales are exactly 1.0")
    first, second = (_judge_one(stored, value, fault) for stored, value in (k, v))
    return LayerVerdict(layer=index, k=first, v=second)


def _judge_one(stored: StoredScale, value: float, fault: str) -> LoadVerdict:
    verdict = judge_number(value, str(stored), fault=fault)
    if value == 0 and stored.values[0] > 0:
        why = f"{stored} is {stored.values[0]:g}, and 0 in the dtype TGI serves it in"
        return LoadVerdict(status=Status.MISREAD, value=0.0, why=why, fix=_NAMES_FIX)
    return verdict
