"""`vllm-json`: the scales file of vLLM 0.4 to 0.6, which SGLang still parses.

Source: `QuantParamSchema` (vLLM `quantization/schema.py`, SGLang `model_loader/weight_utils.py`).
Its readers use either the whole file or, after one line in the log, 1.0 for every layer: keys must
be integers, every layer and rank must be present, and `model_type` must equal the config's.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, WriteJob

if TYPE_CHECKING:
    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.shapes import ModelGeometry

NO_CACHE_SCALE = 1.0
"""The scale of layers without K and V: readers require every layer's index."""


def list_layer_scales(table: ScaleTable, rank: int) -> dict[str, float]:
    """List the scale of every layer on `rank`, by the layer's index."""
    return {
        str(layer.index): table.kv(layer.attention, rank) if layer.attention else NO_CACHE_SCALE
        for layer in table.geometry.layers
    }


def _write(job: WriteJob, path: Path) -> None:
    """Write one scale per layer, for k and v, and for each rank."""
    table = job.table
    factors = {str(rank): list_layer_scales(table, rank) for rank in range(table.tp)}
    kv_cache = {"dtype": table.fmt.dtype_name, "scaling_factor": factors}
    job.save_json(path, {"model_type": table.geometry.model_type, "kv_cache": kv_cache})


def _recognise(files: ScaleFiles) -> bool:
    return any("kv_cache" in document for document in files.documents.values())


def _read(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.formats.kv.read_json import read_json  # noqa: PLC0415 -- imports torch

    return read_json(files, geometry, rank_prefix="", requires_model_type=True)


VLLM_JSON = Dialect(
    name="vllm-json",
    description="one block per rank, every layer, for vLLM 0.4 to 0.6; SGLang misreads it",
    path_pattern="kv_cache_scales.tp{tp}.json",
    write=_write,
    recognise=_recognise,
    read=_read,
    requires_dtype=True,
    scale_suffixes=(),
    json_keys=("kv_cache", "scaling_factor"),
    per_tp=True,
    joins_kv=True,
    lists_all_layers=True,
)
