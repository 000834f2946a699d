"""`vllm-json`: the scales file of vLLM 0.4 to 0.6, which SGLang still parses.

Source: `QuantParamSchema` (vLLM `quantization/schema.py`, SGLang `model_loader/weight_utils.py`).
A reader takes all of it or, after one line in its log, 1.0 for every layer: keys must be integers,
every layer and every rank present, `model_type` equal to the config's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.dialects.dialect import Dialect, ParsedScales, ScaleFiles, WriteJob

if TYPE_CHECKING:
    from fp8calib.geometry.model_geometry import ModelGeometry
    from fp8calib.scales.compute import ScaleTable

KV_CACHE_KEYS = ("kv_cache", "scaling_factor")
NO_CACHE_SCALE = 1.0
"""For layers without K and V: readers want every layer's index, and this scales nothing."""


def list_kv_scales(table: ScaleTable, rank: int) -> dict[str, float]:
    """List the scale of every layer of the model by its index, as `rank` has it."""
    return {
        str(layer.index): table.kv(layer.attention, rank) if layer.attention else NO_CACHE_SCALE
        for layer in table.geometry.layers
    }


def _write(job: WriteJob, path: Path) -> None:
    """Write one scale per layer, that of k and v, for each rank.

    Readers ignore keys at the top that they do not know; inside `scaling_factor` one costs them
    every scale.
    """
    table = job.table
    factors = {str(rank): list_kv_scales(table, rank) for rank in range(table.tp)}
    kv_cache = {"dtype": table.fmt.dtype_name, "scaling_factor": factors}
    job.save_json(path, {"model_type": table.geometry.model_type, "kv_cache": kv_cache})


def _recognise(files: ScaleFiles) -> bool:
    return any("kv_cache" in document for document in files.documents.values())


def _read(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.dialects.kv.read_json import read_json  # noqa: PLC0415 -- imports torch

    return read_json(files, geometry, rank_prefix="", requires_model_type=True)


VLLM_JSON = Dialect(
    name="vllm-json",
    description="the scales file of vLLM 0.4 to 0.6 and SGLang",
    path_pattern="kv_cache_scales.tp{tp}.json",
    write=_write,
    recognise=_recognise,
    read=_read,
    requires_dtype=True,
    scale_suffixes=(),
    json_keys=KV_CACHE_KEYS,
    per_tp=True,
    joins_kv=True,
    lists_all_layers=True,
)
