"""What SGLang does with `--quantization-param-path`.

Its models set `k_scale` and `v_scale` of a layer to the number (`models/llama.py`,
load_kv_cache_scales), by which `mem_cache/memory_pool.py` (MHATokenToKVPool.set_kv_buffer) divides
K and V. Attention multiplies by `k_scale_float` and `v_scale_float`, which stay None:
`flashinfer_backend.py` (FlashInferAttnBackend.forward_decode) takes None for 1.0, `sm_scale *
k_scale` of `triton_backend.py` and `k_scale.expand` of `flashattention_backend.py` are errors, and
so is `.to` of `fused_fp8_qkv_kv_cache.py` (_scale_to_f32), which `trtllm_mha_backend.py` calls.
Read in 0.5.16 and 0.5.23; `aiter_backend.py` passes the number to kernels that were not read.

The loader itself is vLLM's of 0.4 to 0.6 (`srt/model_loader/weight_utils.py`: `QuantParamSchema`,
`kv_cache_scales_loader`), replayed with its coercions. Where anything in the file is wrong, all
scales are 1.0 and one line in the log says why.
"""

from __future__ import annotations

import struct
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

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


class _KvCache(BaseModel):
    dtype: str
    scaling_factor: dict[int, dict[int, float]]


class _Schema(BaseModel):
    model_config = ConfigDict(protected_namespaces=())
    model_type: str | None
    kv_cache: _KvCache


def replay_sglang_json(
    path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder, release: Release
) -> EngineReport:
    """Replay SGLang's loader on a JSON file, on `tp` ranks of a model.

    Raises:
        Refusal: SGLang does not start.
    """
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
        document = _Schema.model_validate(load_json(path))
        _check_context(document, geometry, tp)
    except (OSError, ValueError, OverflowError, RecursionError) as error:
        what = str(error)[:300]
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(ascii(str(part))[1:-1][:40] for part in first["loc"])
            what = f"{where}: {first['msg']}"
        why = f"the engine ignores the file and uses 1.0 for all scales: {what}"
        verdict = LoadVerdict(status=Status.DEFAULTED, value=1.0, why=why, fix=_FIX.format(tp=tp))
        return report_alike(geometry, verdict)
    ranks = document.kv_cache.scaling_factor
    layers = []
    for layer, _ in geometry.attentions():
        one = _judge([ranks[rank][layer.index] for rank in sorted(ranks)])
        layers.append(LayerVerdict(layer=layer.index, k=one, v=one))
    return EngineReport(layers=tuple(layers))


def _check_context(document: _Schema, geometry: ModelGeometry, tp: int) -> None:
    ranks, count = document.kv_cache.scaling_factor, len(geometry.layers)
    if document.kv_cache.dtype != "float8_e4m3fn":
        raise ValueError(f"kv_cache.dtype is {document.kv_cache.dtype!a:.40}, not float8_e4m3fn")
    if len(ranks) != tp:
        raise ValueError(f"it has {len(ranks)} ranks, the engine runs {tp}")
    for rank in range(tp):
        if rank not in ranks:
            raise ValueError(f"rank {rank} is missing")
    for rank, layers in ranks.items():
        if len(layers) != count:
            raise ValueError(f"rank {rank} has {len(layers)} layers, the model {count}")
        missing = next((index for index in range(count) if index not in layers), None)
        if missing is not None:
            raise ValueError(f"rank {rank} has no layer {missing}")
    if document.model_type != geometry.model_type:
        found = document.model_type
        raise ValueError(f"model_type is {found!a:.60}, the model's is {geometry.model_type!r}")


def _judge(numbers: list[float]) -> LoadVerdict:
    """Judge the numbers that ranks have for a layer, in float32."""
    stored = []
    for number in numbers:
        try:
            stored.append(float(struct.unpack("f", struct.pack("f", number))[0]))
        except OverflowError:
            stored.append(float("inf"))
    bad = next((number for number in stored if not is_scale(number)), None)
    shared = "one number for k and v"
    if bad is not None:
        return judge_number(bad, shared)
    why = shared if len(set(stored)) == 1 else f"{shared}; the largest of {len(stored)} ranks"
    return judge_number(max(numbers), why)
