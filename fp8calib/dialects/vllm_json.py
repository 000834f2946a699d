"""`vllm-json`: the scales file of vLLM 0.4 to 0.6, which SGLang still parses.

Source: `QuantParamSchema` (vLLM `quantization/schema.py`, SGLang `model_loader/weight_utils.py`).
A reader takes all of it or, after one line in its log, 1.0 for every layer: keys must be integers,
every layer and every rank present, `model_type` equal to the config's.
"""

from __future__ import annotations

from pathlib import Path

from fp8calib.dialects.json_scales import describe_measurement, list_kv_scales, save_json
from fp8calib.dialects.scale_metadata import Provenance, name_dtype
from fp8calib.scales.compute import ScaleTable


def write_vllm_json(table: ScaleTable, path: Path, *, provenance: Provenance | None = None) -> None:
    """Write one scale per layer, that of k and v, for each rank of the table.

    Readers pass over a `_comment` at the top; inside `scaling_factor` it costs them every scale.

    Raises:
        ExportError: the file cannot be written.
    """
    factors = {str(rank): list_kv_scales(table, rank) for rank in range(table.tp)}
    kv_cache = {"dtype": name_dtype(table.fmt), "scaling_factor": factors}
    document = {"model_type": table.geometry.model_type, "kv_cache": kv_cache}
    comment = {} if provenance is None else {"_comment": provenance.describe()}
    save_json(path, comment | document | describe_measurement(table))
