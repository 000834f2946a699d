"""What TGI does with the KV scales of a checkpoint folder, read in its source.

`layers/attention/kv_cache.py:get_kv_scales`, `utils/hub.py:_weight_files_from_dir`,
`layers/compressed_tensors/loader.py`; served with `--kv-cache-dtype fp8_e4m3fn`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fp8calib.engines.replay.folder import HeldScale, LoadContext, ScaleFolder, require_readable
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.query_scales import note_unread
from fp8calib.engines.replay.recorded_dtype import amend_for_dtype
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    Status,
    judge_number,
    report_refusal,
)
from fp8calib.errors import shorten
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role

_TYPES_WITH_KV_SCALES = (
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "phi",
    "phi3",
    "cohere",
    "dbrx",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_neox",
    "gpt2",
    "gptj",
    "RefinedWeb",
    "RefinedWebModel",
    "falcon",
    "gpt_bigcode",
    "starcoder2",
    "granite",
)
"""Model types whose modeling files call `get_kv_scales` (TGI db931fc); phi3 and granite are run by
llama's."""
_SKIPPED_WORDS = ("arguments", "args", "adapter", "training")
_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_LOADABLE = {
    ("float", 8): ("float-quantized", "naive-quantized"),
    ("int", 8): ("pack-quantized", "int-quantized", "naive-quantized", "marlin-24"),
    ("int", 4): ("pack-quantized", "marlin-24"),
}
"""For the weights of a group, the formats `_create_loader_for_group` knows."""
_UNPARSED = "Cannot parse compressed-tensors configuration"
_GROUPS_MEND = "write config_groups as an object of groups with targets, and ignore as a list"
_NAMES_MEND = "store k_scale and v_scale under the attention module's own path"
_ROUNDED = "kv_scale is rounded to the model's dtype before it is used; k_scale and v_scale are not"


def replay_tgi(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay TGI's loading of a folder; every rank takes the same number, so `tp` plays no part."""
    del tp
    try:
        return _check(folder, geometry)
    except Refusal as refusal:
        return report_refusal(geometry, refusal)


def _check(folder: ScaleFolder, geometry: ModelGeometry) -> EngineReport:
    files = [file for file in folder.files if not any(word in file for word in _SKIPPED_WORDS)]
    require_readable(folder, files)
    _refuse_doubled(folder, files)
    quantization = find_quantization(folder, keys=("quantization_config", "compression_config"))
    if quantization is not None and quantization.get("quant_method") == "compressed-tensors":
        _check_compressed(quantization, geometry)
    scene = LoadContext(folder, geometry, files)
    layers = [_judge(scene, layer.index, attention) for layer, attention in geometry.attentions()]
    note_unread(scene, "TGI does not ask for it")
    if "kv_cache_torch_dtype" in folder.config:
        scene.problems.append(
            "kv_cache_torch_dtype is read only by the branch of pull request 2028"
        )
    report = EngineReport(layers=tuple(layers), problems=tuple(dict.fromkeys(scene.problems)))
    return amend_for_dtype(report, folder, fnuz=_FNUZ, e5m2=_E5M2)


_FNUZ = "merged TGI doubles and halves no KV scale, and its cache is e4m3fn: twice too large"
_E5M2 = "TGI ignores scales with an fp8_e5m2 cache"


def _refuse_doubled(folder: ScaleFolder, files: list[str]) -> None:
    held: dict[str, str] = {}
    for file in files:
        for name in folder.tensors[file]:
            if name in held:
                why = f"{shorten(name)} stands in {held[name]} and in {file}: RuntimeError"
                raise Refusal(why, fix="TGI opens every file, index or not: remove one of them")
            held[name] = file


def _check_compressed(quantization: Mapping[str, object], geometry: ModelGeometry) -> None:
    """Replay `CompressedTensorsLoader`: every linear must be ignored or be of a known group."""
    groups, ignore = quantization.get("config_groups"), quantization.get("ignore") or []
    if not isinstance(groups, dict) or not isinstance(ignore, list):
        raise Refusal(f"{_UNPARSED}: config_groups or ignore", fix=_GROUPS_MEND)
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
            raise Refusal(why, fix='"ignore": ["re:.*"] leaves every module as it is')


def _list_targets(name: str, group: object, form: object) -> list[object]:
    weights = group.get("weights") if isinstance(group, dict) else None
    targets = group.get("targets") if isinstance(group, dict) else None
    if not isinstance(targets, list):
        raise Refusal(f"{_UNPARSED}: group {name!a:.40}", fix=_GROUPS_MEND)
    if form not in _find_formats(weights):
        why = f"Group {name!a:.40} has unsupported compressed-tensors configuration: format is "
        fix = 'leave config_groups empty, or give a float group "format": "naive-quantized"'
        raise Refusal(f"{why}{form!a:.40}", fix=fix)
    return targets


def _find_formats(weights: object) -> tuple[str, ...]:
    """Name the formats that TGI loads weights of this kind in."""
    if not isinstance(weights, dict):
        return ()
    kind = (weights.get("type", "int"), weights.get("num_bits", 8))
    return next((formats for known, formats in _LOADABLE.items() if known == kind), ())


def _list_linears(geometry: ModelGeometry) -> Iterator[str]:
    for _, linear in geometry.linears():
        if not linear.num_experts:
            yield (linear.checkpoint_name or f"{linear.module}.weight").removesuffix(".weight")


def _judge(scene: LoadContext, index: int, attention: Attention) -> LayerVerdict:
    prefix, model_type = attention.checkpoint_module, scene.geometry.model_type
    if model_type not in _TYPES_WITH_KV_SCALES:
        why = f"TGI's {model_type} does not ask for KV scales: 1.0"
        return _absent(scene, index, why, "serve it with another engine")
    k, v, single = (scene.scales.get(f"{prefix}.{name}_scale") for name in ("k", "v", "kv"))
    if k is not None and v is not None:
        return _judge_pair(scene, index, attention, (k, _number(k)), (v, _number(v)))
    if single is not None:
        scene.problems.append(_ROUNDED)
        number = (single, _round(_number(single), scene.geometry))
        return _judge_pair(scene, index, attention, number, number)
    why = f"TGI asks for both {prefix}.k_scale and {prefix}.v_scale, or for kv_scale, alone: 1.0"
    return _absent(scene, index, why, _NAMES_MEND)


def _absent(scene: LoadContext, index: int, why: str, fix: str) -> LayerVerdict:
    k, v = (scene.absent((index, role), why=why, fix=fix) for role in (Role.K, Role.V))
    return LayerVerdict(layer=index, k=k, v=v)


def _number(held: HeldScale) -> float:
    if held.numel != 1:
        why = f"{held} has shape {list(held.shape)}: Key and value scales must be scalar tensors"
        raise Refusal(why, fix="store one number for the layer")
    return held.values[0]


def _round(value: float, geometry: ModelGeometry) -> float:
    dtype = _HALVES.get(geometry.checkpoint_dtype, torch.float16)
    return float(torch.tensor(value).to(dtype))


def _judge_pair(
    scene: LoadContext,
    index: int,
    attention: Attention,
    k: tuple[HeldScale, float],
    v: tuple[HeldScale, float],
) -> LayerVerdict:
    wrong = ""
    if attention.kind == "latent":
        wrong = "TGI caches K and V expanded to heads, and the file's scales are of the latents"
    if k[1] == v[1] == 1.0:
        scene.problems.append("scales of exactly 1.0 take TGI's unscaled path: cast, not clamped")
    first, second = (_judge_one(held, value, wrong) for held, value in (k, v))
    return LayerVerdict(layer=index, k=first, v=second)


def _judge_one(held: HeldScale, value: float, wrong: str) -> LoadVerdict:
    verdict = judge_number(value, str(held), held=wrong)
    if value == 0 and held.values[0] > 0:
        why = f"{held} is {held.values[0]:g}, and 0 in the model's dtype"
        return LoadVerdict(status=Status.MISREAD, value=0.0, why=why, fix=_NAMES_MEND)
    return verdict
