"""What vLLM 0.32.0 does with the KV scales of a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.engines.replay.folder import (
    HeldScale,
    LoadContext,
    ScaleFolder,
    Slot,
    find_indexed,
    require_readable,
)
from fp8calib.engines.replay.kv_cache_method import (
    PairRules,
    is_negative,
    judge_pair,
    require_scalar,
)
from fp8calib.engines.replay.module_targets import matches_target
from fp8calib.engines.replay.quantization_config import find_quantization
from fp8calib.engines.replay.query_scales import (
    list_optional_scales,
    list_queries,
    list_zero_points,
)
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
from fp8calib.engines.vllm.model_types import EXPANDED_TYPES, UNSUPPORTED_TYPES
from fp8calib.engines.vllm.quantization_config import KvMethod, find_kv_method
from fp8calib.engines.vllm.tensor_names import NAMES_MEND, name_vllm_parameter, refuse_unmapped
from fp8calib.geometry.model_geometry import Attention, ModelGeometry
from fp8calib.geometry.sites import Role

_CONFIG_KEYS = (
    "quantization_config",
    "modelopt",
    "text_config.quantization_config",
    "compression_config",
)
_NO_PLACE = "no parameter of vLLM's model has that name, so it is ignored without a word: 1.0"


def replay_vllm(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay vLLM's loading of a folder, with `--kv-cache-dtype fp8` on `tp` ranks."""
    try:
        return _check(folder, geometry, tp)
    except Refusal as refusal:
        return report_refusal(geometry, refusal)


def _check(folder: ScaleFolder, geometry: ModelGeometry, tp: int) -> EngineReport:
    if geometry.model_type in UNSUPPORTED_TYPES:
        raise Refusal(f"vLLM 0.32 does not run {geometry.model_type}", fix="use another engine")
    files = find_indexed(folder, error="FileNotFoundError") if folder.has_index else folder.files
    require_readable(folder, files)
    scene = LoadContext(folder, geometry, files)
    quantization = find_quantization(folder, keys=_CONFIG_KEYS)
    if quantization is None:
        return _check_unquantized(scene)
    method = find_kv_method(quantization, beside=folder.modelopt)
    if method is None:
        return _check_unquantized(scene)
    loaded = _load(scene, method, _list_excluded(quantization, method))
    _check_shapes(scene, quantization, method)
    if method is KvMethod.COMPRESSED_TENSORS:
        layers = _check_compressed(scene, loaded, tp)
    else:
        layers = [_judge(scene, method, loaded, *item) for item in _attentions(geometry)]
    if method is not KvMethod.NONE:
        _note_loaded(scene, method)
    _note_conditions(scene, method)
    if geometry.has_latent_attention:
        layers = [_misread_latents(layer) for layer in layers]
    report = EngineReport(layers=tuple(layers), problems=tuple(scene.problems))
    is_kept = method is KvMethod.COMPRESSED_TENSORS
    return amend_for_dtype(
        report,
        folder,
        fnuz=_KEPT if is_kept else _DOUBLED,
        e5m2=_E5M2,
        fnuz_device="AMD gfx94x" if is_kept else "",
    )


def _misread_latents(layer: LayerVerdict) -> LayerVerdict:
    """Say of scales that vLLM takes for latents it expands that they are of other numbers."""
    k, v = (
        one.model_copy(update=_EXPANDED) if one.status is Status.USED else one
        for one in (layer.k, layer.v)
    )
    return LayerVerdict(layer=layer.layer, k=k, v=v)


_EXPANDED = {
    "status": Status.MISREAD,
    "why": "vLLM caches K and V of this model expanded to heads, the scales are of the latents",
    "fix": "serve it with --kv-cache-dtype auto, or without scales",
}


_E5M2 = "vLLM refuses an fp8_e5m2 cache for a checkpoint with scales (ValueError)"
_DOUBLED = "vLLM takes it as a scale for e4m3fn, doubled once more on AMD gfx94x"
_KEPT = (
    "compressed-tensors' method uses it unchanged: right on AMD gfx94x alone, twice too large for "
    "the e4m3fn cache of every other device"
)


def _check_unquantized(scene: LoadContext) -> EngineReport:
    stray = next(iter(scene.scales.values()), None)
    if stray is not None:
        why = f"{stray}: without a quantization_config no module has a place for it (ValueError)"
        fix = "add the quantization_config of kv-overlay to config.json"
        raise Refusal(why, fix=fix)
    return EngineReport(layers=tuple(_absent_layers(scene)))


def _absent_layers(scene: LoadContext) -> list[LayerVerdict]:
    verdicts = []
    for index, _ in _attentions(scene.geometry):
        k, v = (scene.absent((index, role), why="", fix="") for role in (Role.K, Role.V))
        verdicts.append(LayerVerdict(layer=index, k=k, v=v))
    return verdicts


def _attentions(geometry: ModelGeometry) -> list[tuple[int, Attention]]:
    return [(layer.index, attention) for layer, attention in geometry.attentions()]


def _list_excluded(quantization: Mapping[str, object], method: KvMethod) -> list[object]:
    """List what a Quark config excludes; expressions there may mean the attention layers too."""
    excluded = quantization.get("exclude")
    return excluded if method is KvMethod.QUARK and isinstance(excluded, list) else []


def _load(
    scene: LoadContext, method: KvMethod, excluded: Sequence[object]
) -> dict[Slot, HeldScale]:
    places: dict[str, Slot] = {
        f"{layer}.{role}_scale": (index, role)
        for index, attention in _attentions(scene.geometry)
        if _has_place(scene, attention) and method is not KvMethod.NONE
        for layer in (f"{attention.checkpoint_module}.attn",)
        if not any(matches_target(target, layer) for target in excluded)
        for role in (Role.K, Role.V)
    }
    refuse_unmapped(scene, method)
    return scene.load(lambda name: places.get(name_vllm_parameter(name, method)))


def _has_place(scene: LoadContext, attention: Attention) -> bool:
    return attention.kind == "heads" or scene.geometry.model_type in EXPANDED_TYPES


def _judge(
    scene: LoadContext,
    method: KvMethod,
    loaded: dict[Slot, HeldScale],
    index: int,
    attention: Attention,
) -> LayerVerdict:
    if not _has_place(scene, attention) or method is KvMethod.NONE:
        return _placeless(scene, index, attention)
    rules = PairRules("vLLM", is_negative, _NO_PLACE, NAMES_MEND)
    return judge_pair(scene, index, loaded, rules)


def _placeless(scene: LoadContext, index: int, attention: Attention) -> LayerVerdict:
    why, fix = "the quantization method has no place for KV scales", "write a kv-overlay"
    if attention.kind == "latent":
        why = "no KV scale reaches multi-head latent attention in vLLM 0.32: 1.0"
        fix = "serve it with 1.0, or with SGLang in ModelOpt's names"
    k, v = (scene.absent((index, role), why=why, fix=fix) for role in (Role.K, Role.V))
    return LayerVerdict(layer=index, k=k, v=v)


def _check_shapes(scene: LoadContext, quantization: Mapping[str, object], method: KvMethod) -> None:
    """Refuse scales of q, and zero points, in a shape that no parameter has."""
    scheme = quantization.get("kv_cache_scheme")
    per_head = isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"
    for held in list_queries(scene):
        if not per_head:
            require_scalar(held, "vLLM")
        elif not any(_fits_query(held, attention) for _, attention in _attentions(scene.geometry)):
            why = f"{held} has shape {list(held.shape)}, which no number of heads goes with"
            raise Refusal(f"{why}: RuntimeError", fix="store one number a head of q, or none")
    if method is KvMethod.COMPRESSED_TENSORS and not per_head:
        for held in list_zero_points(scene):
            require_scalar(held, "vLLM")


def _fits_query(held: HeldScale, attention: Attention) -> bool:
    """Tell whether vLLM can reduce a scale of q to one for each KV head: it takes the maxima."""
    groups, rest = divmod(held.numel, attention.num_heads // attention.num_kv_heads)
    return not rest and (groups == 1 or groups >= attention.num_kv_heads)


def _check_compressed(
    scene: LoadContext, loaded: dict[Slot, HeldScale], tp: int
) -> list[LayerVerdict]:
    quantization = find_quantization(scene.folder, keys=_CONFIG_KEYS) or {}
    scheme = quantization.get("kv_cache_scheme")
    per_head = isinstance(scheme, dict) and scheme.get("strategy") == "attn_head"
    if per_head and loaded and not isinstance(quantization.get("config_groups"), dict):
        why = "attn_head without config_groups: vLLM does not learn the number of heads, and stops"
        raise Refusal(why, fix="add config_groups, with a group that matches nothing")
    verdicts = []
    for index, attention in _attentions(scene.geometry):
        if not _has_place(scene, attention):
            verdicts.append(_placeless(scene, index, attention))
            continue
        k, v = (
            _judge_compressed(scene, (index, role), loaded, attention if per_head else None, tp)
            for role in (Role.K, Role.V)
        )
        verdicts.append(LayerVerdict(layer=index, k=k, v=v))
    return verdicts


def _judge_compressed(
    scene: LoadContext,
    slot: Slot,
    loaded: dict[Slot, HeldScale],
    heads: Attention | None,
    tp: int,
) -> LoadVerdict:
    held = loaded.get(slot)
    if held is None:
        return _unloaded(scene, slot, loaded)
    if heads is not None:
        return _judge_heads(scene, held, heads.num_kv_heads, tp)
    return judge_number(require_scalar(held, "vLLM"), str(held))


def _unloaded(scene: LoadContext, slot: Slot, loaded: dict[Slot, HeldScale]) -> LoadVerdict:
    k = loaded.get((slot[0], Role.K))
    if k is not None and k.name.endswith(".kv_scale"):
        why = f"{k} becomes k_scale, and compressed-tensors' method copies it to no v_scale: 1.0"
        fix = "store it as k_scale and as v_scale"
        return LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=fix)
    return scene.absent(slot, why=_NO_PLACE, fix=NAMES_MEND)


def _judge_heads(scene: LoadContext, held: HeldScale, num_heads: int, tp: int) -> LoadVerdict:
    """Judge a scale for each head: ranks take their slice, and one number spreads over one rank."""
    if held.numel < num_heads and not (held.numel == 1 and tp == 1):
        why = f"{held} has shape {list(held.shape)} for {num_heads} KV heads: RuntimeError"
        raise Refusal(why, fix=f"store [{num_heads}, 1, 1], or strategy tensor with one number")
    taken = held.values[:num_heads]
    bad = [value for value in taken if not 0 < value < float("inf")]
    if bad:
        return judge_number(bad[0], str(held))
    largest = max(taken)
    if held.numel > num_heads:
        why = f"{held} has {held.numel} numbers, of which the first {num_heads} are taken"
        return LoadVerdict(status=Status.MISREAD, value=largest, why=why, fix="write one a KV head")
    if held.numel < num_heads:
        scene.problems.append("attn_head with one number a layer: it is spread over all heads")
    return judge_number(largest, f"the largest of {held.numel} heads, {held}")


def _note_conditions(scene: LoadContext, method: KvMethod) -> None:
    quantization = find_quantization(scene.folder, keys=_CONFIG_KEYS) or {}
    scheme = quantization.get("kv_cache_scheme")
    if isinstance(scheme, dict) and scheme.get("strategy") == "attn_head":
        scene.problems.append(
            "per-head scales need FlashAttention 3 or later; where the backend wants one number "
            "(a CPU), the largest of a layer serves all its heads"
        )
    turns_on = method in (KvMethod.COMPRESSED_TENSORS, KvMethod.MODELOPT)
    if scene.scales and not (turns_on and isinstance(scheme, dict)):
        scene.problems.append("the cache is FP8 only with --kv-cache-dtype fp8: auto leaves it off")
    if scene.scales and method is KvMethod.COMPRESSED_TENSORS:
        scene.problems.append(
            "on AMD gfx94x (fnuz) compressed-tensors' KV scales are not doubled: e4m3fn scales "
            "clip there above 240/448 of the calibrated range"
        )


def _note_loaded(scene: LoadContext, method: KvMethod) -> None:
    """Say what vLLM does with these scales, where there are any."""
    for what, found in list_optional_scales(scene):
        bad = [held for held in found if not all(0 < v < float("inf") for v in held.values)]
        if bad and method is KvMethod.COMPRESSED_TENSORS:
            scene.problems.append(f"{bad[0]} is no scale, and vLLM takes it as it stands")
        elif bad:
            scene.problems.append(f"{bad[0]} is no scale; where it is not above 0, 1.0 is used")
        elif found:
            scene.problems.append(
                f"{what} is loaded ({len(found)}, such as {found[0]}): backends that quantize the "
                "query use it (FlashAttention 3, FlashInfer, Triton on CUDA), others do not"
            )
