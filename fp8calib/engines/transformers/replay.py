"""What transformers 5.23 with compressed-tensors 0.20 does with the KV scales of a folder.

Tried on tiny models: only `quant_method: compressed-tensors` gives attention modules scales, under
their own names, of shape [1] or [heads, 1, 1], in the model's dtype; every other scale is reported
as unexpected, and a missing one stays uninitialised memory (`initialize_qparams`: torch.empty).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.checkpoint.weight_index import INDEX_NAME, SINGLE_FILE_NAME
from fp8calib.engines.replay.folder import (
    HeldScale,
    LoadContext,
    ScaleFolder,
    Slot,
    find_indexed,
    require_readable,
)
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
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role

_UNEXPECTED_TYPES = (
    *("bloom", "dbrx", "falcon", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "mpt", "persimmon"),
)
"""Model types where compressed-tensors finds no attention to put scales on (tried on 5.23): it
wants a k_proj, v_proj, qkv_proj or kv_b_proj, and past_key_values among the arguments."""
_REBUILT_TYPES = ("llama4_text",)
"""Model types whose experts transformers 5.23 makes anew under any `quantization_config`, and
leaves without their weights (`quantizers/base.py`, MODULES_TO_PATCH_FOR_QUANTIZATION; tried)."""
_REBUILT = (
    "the experts are made anew under any quantization_config and their weights reported MISSING: "
    "they are random numbers"
)
_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_FIX = "write a kv-overlay: compressed-tensors with kv_cache_scheme, scales of shape [1]"
_UNSET = "the scale is MISSING, and the parameter keeps whatever its memory held"


def replay_transformers(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay `from_pretrained` with `dtype="auto"`; `tp` plays no part."""
    del tp
    try:
        return _check(folder, geometry)
    except Refusal as refusal:
        return report_refusal(geometry, refusal)


def _check(folder: ScaleFolder, geometry: ModelGeometry) -> EngineReport:
    scene = LoadContext(folder, geometry, _find_files(folder))
    quantization = find_quantization(folder, keys=("quantization_config",)) or {}
    if quantization.get("quant_method") == "quark":
        raise Refusal("a Quark checkpoint needs AMD's Quark package (ImportError)", fix=_FIX)
    scheme = _find_scheme(quantization, folder, geometry)
    if SINGLE_FILE_NAME in folder.files and folder.has_index:
        scene.problems.append(
            f"{SINGLE_FILE_NAME} goes before {INDEX_NAME}, which is not looked at"
        )
    layers = [
        _judge(scene, layer.index, attention, scheme) for layer, attention in geometry.attentions()
    ]
    note_unread(scene, "reported as unexpected")
    report = EngineReport(
        layers=tuple(layers),
        problems=tuple(dict.fromkeys(scene.problems)),
        weights=_judge_experts(quantization, folder, geometry),
    )
    return amend_for_dtype(report, folder, fnuz=_FNUZ, e5m2=_E5M2)


def _judge_experts(
    quantization: Mapping[str, object], folder: ScaleFolder, geometry: ModelGeometry
) -> LoadVerdict | None:
    is_rebuilt = geometry.model_type in _REBUILT_TYPES
    if quantization and is_rebuilt and _has_stacked_experts(folder):
        return LoadVerdict(status=Status.MISREAD, why=_REBUILT, fix="serve it with vLLM or SGLang")
    return None


def _has_stacked_experts(folder: ScaleFolder) -> bool:
    """Tell whether the experts of a layer are one tensor: one for each is what is made anew."""
    names = (name for held in folder.tensors.values() for name in held)
    return any(name.endswith(".experts.gate_up_proj") for name in names)


_FNUZ = "compressed-tensors quantizes to e4m3fn, for which it is twice too large"
_E5M2 = "compressed-tensors quantizes to e4m3fn with a number that was made for e5m2"


def _find_files(folder: ScaleFolder) -> list[str]:
    """Find the files as `modeling_utils.py` does: model.safetensors before an index."""
    if SINGLE_FILE_NAME in folder.files:
        files = [SINGLE_FILE_NAME]
    elif folder.has_index:
        files = find_indexed(folder, error="OSError")
    else:
        why = f"no file named {SINGLE_FILE_NAME} and no {INDEX_NAME} (OSError)"
        raise Refusal(why, fix="rename the one file, or write an index")
    require_readable(folder, files)
    return files


def _find_scheme(
    quantization: Mapping[str, object], folder: ScaleFolder, geometry: ModelGeometry
) -> Mapping[str, object] | None:
    """Give the scheme that makes attention modules hold scales; None where they hold none.

    Raises:
        Refusal: loading fails.
    """
    if quantization.get("quant_method") != "compressed-tensors":
        return None
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict):
        raise Refusal("config_groups is not an object (ValidationError)", fix=_FIX)
    if not groups and any(linear.num_experts for _, linear in geometry.linears()):
        why = "empty config_groups on a model with experts: IndexError in get_experts_scheme"
        raise Refusal(why, fix='add a group that matches nothing: "targets": ["re:^no-module$"]')
    scheme = quantization.get("kv_cache_scheme")
    if scheme is None or geometry.model_type in _UNEXPECTED_TYPES:
        return None
    if not isinstance(scheme, dict):
        raise Refusal("kv_cache_scheme is not an object (ValidationError)", fix=_FIX)
    if geometry.model_type == "opt" and "num_key_value_heads" not in folder.config:
        raise Refusal("OPT's config has no num_key_value_heads: ValueError", fix="use vLLM")
    return None if scheme.get("dynamic") is True else scheme


def _judge(
    scene: LoadContext, index: int, attention: Attention, scheme: Mapping[str, object] | None
) -> LayerVerdict:
    if attention.producer is not None and scheme is not None:
        scene.problems.append(
            "scales of layers that read another layer's cache are reported as unexpected: "
            "the layer that writes the cache quantizes it"
        )
        index_of_cache, owner = attention.producer, scene.geometry.layers[attention.producer]
        theirs = owner.attention or attention
        k, v = (_judge_role(scene, (index_of_cache, r), theirs, scheme) for r in (Role.K, Role.V))
    else:
        k, v = (_judge_role(scene, (index, r), attention, scheme) for r in (Role.K, Role.V))
    return LayerVerdict(layer=index, k=k, v=v)


def _judge_role(
    scene: LoadContext, slot: Slot, attention: Attention, scheme: Mapping[str, object] | None
) -> LoadVerdict:
    if scheme is None:
        why = "reported as unexpected, and the cache is not quantized"
        verdict = scene.absent(slot, why=why, fix=_FIX)
        return verdict.model_copy(update={"value": None})
    held = scene.scales.get(f"{attention.checkpoint_module}.{slot[1]}_scale")
    if held is None:
        verdict = scene.absent(slot, value=None, why=_UNSET, fix=_FIX)
        why = verdict.why if _UNSET in verdict.why else f"{verdict.why}; {_UNSET}"
        return verdict.model_copy(update={"why": why})
    _check_shape(held, attention, per_head=scheme.get("strategy") == "attn_head")
    if (scheme.get("type", "int"), scheme.get("num_bits", 8)) != ("float", 8):
        why = f"{held}: kv_cache_scheme is not FP8, so it scales other numbers"
        misread = {"status": Status.MISREAD, "why": why, "fix": _FIX}
        return _judge_rounded(scene, held).model_copy(update=misread)
    return _judge_rounded(scene, held)


def _check_shape(held: HeldScale, attention: Attention, *, per_head: bool) -> None:
    heads = attention.num_kv_heads
    if attention.kind == "latent" and per_head:
        raise Refusal("attn_head scales of latent attention: RuntimeError", fix=_FIX)
    wanted = (heads, 1, 1) if per_head else (1,)
    if held.shape != wanted:
        why = f"{held} has shape {list(held.shape)}, the parameter {list(wanted)}: RuntimeError"
        raise Refusal(why, fix=f"store it in shape {list(wanted)}")


def _judge_rounded(scene: LoadContext, held: HeldScale) -> LoadVerdict:
    dtype = _DTYPES.get(scene.geometry.checkpoint_dtype, torch.float32)
    values = torch.tensor(held.values).to(dtype).float().tolist()
    if dtype is not torch.float32:
        scene.problems.append(
            f"scales are rounded to the model's {scene.geometry.checkpoint_dtype}"
        )
    bad = [value for value in values if not 0 < value < float("inf")]
    source = str(held) if len(values) == 1 else f"the largest of {len(values)} heads, {held}"
    return judge_number(bad[0] if bad else max(values), source)
