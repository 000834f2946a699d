"""LightLLM: it takes KV scales from its own file alone. Read in 88b2fc6, never run.

`lightllm/common/kv_cache_mem_manager/fp8_static_per_head_quant_mem_manager.py` and
`fp8_static_per_tensor_quant_mem_manager.py`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.checkpoint.json_files import load_json_object
from fp8calib.engines.engine import Engine
from fp8calib.errors import ModelError
from fp8calib.numerics.formats import E4M3FN
from fp8calib.plugins.lightllm.format import PER_HEAD, PER_TENSOR, QUERY, find_misfit

if TYPE_CHECKING:
    from fp8calib.engines.replay.folder import ScaleFolder
    from fp8calib.engines.replay.verdicts import EngineReport
    from fp8calib.model.geometry import ModelGeometry

_FIX = "`fp8calib export STATS --format lightllm --out DIR` writes it"
_NO_QUERY = (
    "later commits need q_calibration beside scales per head: "
    "`fp8calib export STATS --format lightllm-head --query-scale yes --out DIR` writes it"
)
_UNREAD = "which models LightLLM serves with an FP8 cache was not read"


def _replay_json(path: Path, geometry: ModelGeometry, tp: int, model: ScaleFolder) -> EngineReport:  # noqa: ARG001
    """Replay `_load_and_check_config` for the type of cache that the file is for.

    Raises:
        Refusal: LightLLM does not start.
    """
    from fp8calib.engines.replay.verdicts import (  # noqa: PLC0415
        EngineReport,
        LayerVerdict,
        Refusal,
        is_scale,
        judge_number,
    )

    try:
        document: dict[str, Any] = load_json_object(path)
    except ModelError as error:
        raise Refusal(error.message, fix=_FIX) from error
    attentions = list(geometry.attentions())
    if fault := _find_fault(document, geometry, model):
        raise Refusal(f"LightLLM does not start with it: {fault}", fix=_FIX)
    layers = []
    for (layer, _), row in zip(attentions, document["scales"], strict=True):
        width = len(row) // 2
        why = "the largest of its heads" if width > 1 else "its scale"
        parts = (list(map(float, part)) for part in (row[:width], row[width:]))
        bad_first = (
            next((each for each in part if not is_scale(each)), max(part)) for part in parts
        )
        k, v = (judge_number(each, why) for each in bad_first)
        layers.append(LayerVerdict(layer=layer.index, k=k, v=v))
    needs_query = document["quant_type"] == PER_HEAD and not document.get(QUERY)
    problems = (_UNREAD, *([_NO_QUERY] if needs_query else []))
    return EngineReport(layers=tuple(layers), problems=problems)


def _find_fault(document: dict[str, Any], geometry: ModelGeometry, model: ScaleFolder) -> str:
    """Say at what LightLLM stops; empty if it starts."""
    attentions = [attention for _, attention in geometry.attentions()]
    if misfit := find_misfit(geometry):
        return misfit
    heads = attentions[0].num_kv_heads
    if missing := [key for key in _KEYS if key not in document]:
        return f"KeyError: {missing[0]}"
    per_head = document["quant_type"] == PER_HEAD
    named = model.config.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else geometry.architecture
    width = 2 * heads if per_head else 2
    rows, shape, count = document["scales"], document["scales_shape"], len(attentions)
    kind, layers = document["quant_type"], document["num_layers"]
    checks = {
        "qmin or qmax is not that of float8_e4m3fn": (document["qmin"], document["qmax"])
        == (-E4M3FN.max, E4M3FN.max),
        f"architectures is {document['architectures']!a:.60}, the model's {architecture}": document[
            "architectures"
        ]
        == architecture,
        f"num_layers is {layers!a:.20}, the model has {count} with a cache": layers == count,
        f"quant_type {kind!a:.40} is of no type of its cache": kind in (PER_HEAD, PER_TENSOR),
        f"scales or scales_shape is not {[count, width]}": shape == [count, width]
        and _is_table(rows, count, width),
        f"{heads} KV heads are not num_head": not per_head or document["num_head"] == heads,
    }
    return next((fault for fault, holds in checks.items() if not holds), "")


_KEYS = (
    *("quant_type", "qmin", "qmax", "architectures", "num_layers", "num_head"),
    *("scales_shape", "scales"),
)


_LARGEST = 2**63
"""Torch takes no larger integer into a tensor."""


def _is_table(rows: object, count: int, width: int) -> bool:
    return (
        isinstance(rows, list)
        and len(rows) == count
        and all(isinstance(row, list) and len(row) == width for row in rows)
        and all(isinstance(each, int | float) for row in rows for each in row)
        and not any(isinstance(each, int) and abs(each) > _LARGEST for r in rows for each in r)
    )


LIGHTLLM_ENGINE = Engine(
    key="lightllm",
    title="LightLLM",
    version="88b2fc6",
    command="python -m lightllm.server.api_server --model_dir",
    kv_flag="--llm_kv_type fp8kv_spt",
    trust_flag="--trust_remote_code",
    no_numerics="its arithmetic has not been read",
    replay_json=_replay_json,
    no_folder="it takes KV scales from a file alone: name the kv_cache_calib.json that "
    "`fp8calib export STATS --format lightllm --out DIR` writes",
)
