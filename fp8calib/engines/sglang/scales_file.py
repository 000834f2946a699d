"""What SGLang does with `--quantization-param-path`.

Its models set `k_scale` and `v_scale` of a layer to the number (`models/llama.py`,
load_kv_cache_scales), by which `mem_cache/memory_pool.py` (MHATokenToKVPool.set_kv_buffer) divides
K and V. Attention multiplies by `k_scale_float` and `v_scale_float`, which stay None:
`flashinfer_backend.py` (FlashInferAttnBackend.forward_decode) takes None for 1.0, `sm_scale *
k_scale` of `triton_backend.py` and `k_scale.expand` of `flashattention_backend.py` are errors, and
so is `.to` of `fused_fp8_qkv_kv_cache.py` (_scale_to_f32), which `trtllm_mha_backend.py` calls.
Read in 0.5.16 and 0.5.23; `aiter_backend.py` passes the number to kernels that were not read.

The loader itself is vLLM's of 0.4 to 0.6 (`srt/model_loader/weight_utils.py`: `QuantParamSchema`,
`kv_cache_scales_loader`). Where anything in the file is wrong, all scales are 1.0 and one line in
the log says why. Numbers in quotes and such, which the loader converts, are called wrong here.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from fp8calib.checkpoint.json_files import load_json
from fp8calib.engines.facts.release import Release
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    Refusal,
    is_scale,
    judge_number,
    report_alike,
)
from fp8calib.engines.sglang.replay import find_fault, find_sglang_type, has_class
from fp8calib.engines.status import Status
from fp8calib.errors import cut_list
from fp8calib.model.geometry import ModelGeometry

_READS_FILE = "class of this model type reads a file of scales"
_WHY = (
    "SGLang divides K and V by the scale where it stores them, and does not multiply where it "
    "reads them: FlashInfer attends to the quotients, FlashAttention, Triton and TRT-LLM fail"
)
_OVERLAY_FIX = "serve a kv-overlay instead"
_FIX = (
    "`fp8calib export STATS --format vllm-json --tp {tp} --out DIR` writes a file that is accepted"
)


def replay_sglang_json(
    path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder, release: Release
) -> EngineReport:
    """Replay SGLang's loader on a JSON file, on `tp` ranks of a model; `Refusal` if it stops."""
    # multimodal classes read none
    is_wrapped = geometry.is_wrapped and geometry.model_type != "glm5_next"
    has_own = has_class(geometry.architecture, release) and not is_wrapped
    if not has_own or not release.has(_READS_FILE, geometry.model_type):
        owner = f"{release.title}'s {find_sglang_type(geometry, release)}"
        why = f"{owner} reads no file of scales: RuntimeError at start"
        raise Refusal(why, fix=_OVERLAY_FIX)
    report = _replay_loader(path, geometry, tp)
    if any(layer.k.status is Status.DEFAULTED for layer in report.layers):
        return report
    try:
        fault = find_fault(model, geometry, release)
    except Refusal as refusal:
        fault = refusal.why, refusal.fix
    if fault is None:
        why = "the model's quantization_config makes k_scale a parameter: setting it is a TypeError"
        raise Refusal(why, fix="store the scales in the checkpoint")
    return report.change(lambda one: one.misread(_WHY, _OVERLAY_FIX))


def _replay_loader(path: Path, geometry: ModelGeometry, tp: int) -> EngineReport:
    try:
        ranks = _read_ranks(load_json(path), geometry, tp)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        why = f"the engine ignores the file and uses 1.0 for all scales: {str(error)[:300]}"
        verdict = LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=_FIX.format(tp=tp))
        return report_alike(geometry, verdict)
    layers = []
    for layer, _ in geometry.attentions():
        numbers = [rank[layer.index] for rank in ranks]
        bad = next((number for number in numbers if not is_scale(number)), None)
        why = "one number for k and v"
        if bad is None and len(set(numbers)) > 1:
            why = f"{why}; the largest of {tp} ranks"
        one = judge_number(max(numbers) if bad is None else bad, why)
        layers.append(LayerVerdict(layer=layer.index, k=one, v=one))
    return EngineReport(layers=tuple(layers))


def _read_ranks(document: object, geometry: ModelGeometry, tp: int) -> list[list[float]]:
    """Read the number of each layer by rank, in float32; ValueError where something is wrong."""
    cache = document.get("kv_cache") if isinstance(document, dict) else None
    factors = cache.get("scaling_factor") if isinstance(cache, dict) else None
    if not isinstance(document, dict) or not isinstance(cache, dict) or factors is None:
        raise ValueError("there is no kv_cache.scaling_factor")
    meant = {"model_type": geometry.model_type, "dtype": "float8_e4m3fn"}
    for key, found in (("model_type", document.get("model_type")), ("dtype", cache.get("dtype"))):
        if found != meant[key]:
            raise ValueError(f"{key} is {found!a:.60}, not {meant[key]}")
    ranks = _list_items("scaling_factor", factors, tp)
    layers = [_list_items(f"rank {n}", held, len(geometry.layers)) for n, held in enumerate(ranks)]
    numbers = [number for held in layers for number in held]
    if wrong := [x for x in numbers if isinstance(x, bool) or not isinstance(x, int | float)]:
        raise ValueError(f"{wrong[0]!a:.60} is not a number")
    with np.errstate(over="ignore"):
        stored: list[list[float]] = np.array(layers, np.float64).astype(np.float32).tolist()
    return stored


def _list_items(what: str, held: object, count: int) -> list[object]:
    """List what an object has for 0, 1, ...; ValueError where it has other keys."""
    names = [str(number) for number in range(count)]
    if not isinstance(held, dict) or held.keys() != {*names}:
        keys = cut_list([ascii(key)[:40] for key in held]) if isinstance(held, dict) else held
        raise ValueError(f"the keys of {what} are {keys!s:.200}, not 0 to {count - 1}")
    return [held[name] for name in names]
