"""The loader of a JSON file of scales in vLLM 0.4-0.6, of which SGLang has a copy.

Read in SGLang 0.5.23, `srt/model_loader/weight_utils.py` (`QuantParamSchema`,
`kv_cache_scales_loader`), and replayed with its coercions. Where anything in the file is wrong, all
scales are 1.0 and one line in the log says why.
"""

from __future__ import annotations

import struct
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from fp8calib.checkpoint.json_files import load_json
from fp8calib.engines.replay.verdicts import (
    EngineReport,
    LayerVerdict,
    LoadVerdict,
    is_scale,
    judge_number,
    report_alike,
)
from fp8calib.engines.status import Status
from fp8calib.model.shapes import ModelGeometry

Ranks = dict[int, dict[int, float]]

_FIX = "export --format vllm-json --tp {tp} for this model writes a file that is accepted"


class _KvCache(BaseModel):
    dtype: str
    scaling_factor: Ranks


class _Schema(BaseModel):
    model_config = ConfigDict(protected_namespaces=())
    model_type: str | None
    kv_cache: _KvCache


def replay_scales_file(path: Path, geometry: ModelGeometry, tp: int) -> EngineReport:
    """Replay the loader on `tp` ranks of a model."""
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
