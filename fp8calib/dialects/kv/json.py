"""`vllm-json`: the scales file of vLLM 0.4 to 0.6, which SGLang still parses.

Source: `QuantParamSchema` (vLLM `quantization/schema.py`, SGLang `model_loader/weight_utils.py`).
A reader takes all of it or, after one line in its log, 1.0 for every layer: keys must be integers,
every layer and every rank present, `model_type` equal to the config's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import torch

from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.checkpoint.json_files import load_json_object, parse_unique_keys
from fp8calib.dialects.kv.metadata import (
    JSON_MEASURED_KEY,
    Provenance,
    find_format,
    find_origin,
    name_dtype,
)
from fp8calib.dialects.kv.validate import (
    ONE_FILLS_BOTH,
    ParsedScales,
    check_scales,
    cut_list,
    join_ranks,
    reading_errors,
    refusal,
)
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.scales.compute import ScaleTable
from fp8calib.stats.calibration_origin import CalibrationOrigin


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


NO_CACHE_SCALE = 1.0
"""For layers without K and V: readers want every layer's index, and this scales nothing."""


def list_kv_scales(table: ScaleTable, rank: int) -> dict[str, float]:
    """List the scale of every layer of the model by its index, as `rank` has it."""
    return {
        str(layer.index): table.kv(layer.attention, rank) if layer.attention else NO_CACHE_SCALE
        for layer in table.geometry.layers
    }


def describe_measurement(table: ScaleTable) -> dict[str, object]:
    """Say at the top of a document what the scales were measured on; readers pass over the key."""
    return {} if table.origin is None else {JSON_MEASURED_KEY: table.origin.to_fields()}


def save_json(path: Path, document: object) -> None:
    """Write a JSON file; every float reads back as the fp32 it was.

    Raises:
        ExportError: the file cannot be written.
    """
    text = json.dumps(document, indent=2, allow_nan=False)
    write_file_atomic(path, f"{text}\n".encode())


_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
_RANK_KEYS = {
    "vllm-json": re.compile(rf"({_INDEX.pattern})"),
    "rfc": re.compile(rf"rank({_INDEX.pattern})"),
}
_FEW_EXTRA = 1000
"""So many layers too many are named one by one; more are counted."""
_FORM_HINT = 'expected {"model_type": ..., "kv_cache": {"dtype": ..., "scaling_factor": {...}}}'


def read_json(path: Path, geometry: ModelGeometry) -> ParsedScales:
    """Read the KV scales of a JSON file; its sections about weights are not looked at.

    Raises:
        VerificationError: the file is not to the letter of a dialect, or of another model.
    """
    document = load_object(path)
    kv_cache = document.get("kv_cache")
    if not isinstance(kv_cache, dict):
        raise refusal(path, "there is no `kv_cache` object", hint=_FORM_HINT)
    is_named = "dtype" in kv_cache
    fmt = find_format(path, "kv_cache.dtype", kv_cache["dtype"]) if is_named else None
    factors = kv_cache.get("scaling_factor")
    if not isinstance(factors, dict) or not factors:
        raise refusal(path, "there is no `scaling_factor` object in `kv_cache`", hint=_FORM_HINT)
    dialect = _find_dialect(path, factors)
    _check_model_type(path, document, geometry, dialect)
    _check_counts(path, factors, geometry)
    ranks = {
        int(_RANK_KEYS[dialect].sub(r"\1", key)): _read_rank(path, key, layers)
        for key, layers in factors.items()
    }
    return ParsedScales(
        dialect=dialect,
        values=join_ranks(path, geometry, ranks),
        tp=len(ranks),
        fmt=fmt,
        origin=_find_recorded(path, document),
        files=(path,),
        notes=(ONE_FILLS_BOTH,),
    )


def is_scales_json(document: Mapping[str, object]) -> bool:
    """Tell whether a JSON document has a place for KV scales."""
    return "kv_cache" in document


def load_object(path: Path) -> dict[str, object]:
    """Load a JSON object in which no key stands twice.

    Raises:
        VerificationError: the file cannot be read, or is none.
    """
    with reading_errors():
        return load_json_object(path, parse=parse_unique_keys)


def _find_recorded(path: Path, document: Mapping[str, object]) -> CalibrationOrigin | None:
    if JSON_MEASURED_KEY not in document:
        return None
    return find_origin(path, JSON_MEASURED_KEY, document[JSON_MEASURED_KEY])


def _find_dialect(path: Path, factors: Mapping[str, object]) -> str:
    for dialect, pattern in _RANK_KEYS.items():
        if all(pattern.fullmatch(key) for key in factors):
            return dialect
    keys = cut_list([ascii(key)[:40] for key in factors])
    hint = 'ranks are "0", "1", ... (vllm-json) or "rank0", "rank1", ... (rfc), never both'
    raise refusal(path, f"the keys of kv_cache.scaling_factor are not ranks: {keys}", hint=hint)


def _check_model_type(
    path: Path, document: Mapping[str, object], geometry: ModelGeometry, dialect: str
) -> None:
    if dialect == "vllm-json" and "model_type" not in document:
        raise refusal(path, "there is no `model_type`", hint="engines refuse the file for it")
    model_type = document.get("model_type")
    if model_type is not None and model_type != geometry.model_type:
        fault = f"model_type is {model_type!a:.60}, the model's is {geometry.model_type!r}"
        raise refusal(path, fault, hint="the file is of another model")


def _check_counts(path: Path, factors: Mapping[str, object], geometry: ModelGeometry) -> None:
    """Refuse what is far too large for the model before a million numbers are looked at."""
    heads = max((attention.num_heads for _, attention in geometry.attentions()), default=1)
    if len(factors) > heads:
        fault = f"{len(factors)} ranks, and the model has {heads} attention heads to split"
        raise refusal(path, fault, hint="the file is of another model")
    count = len(geometry.layers)
    for rank, layers in factors.items():
        if isinstance(layers, dict) and len(layers) > count + _FEW_EXTRA:
            fault = f"kv_cache.scaling_factor.{rank} has {len(layers)} layers, the model {count}"
            raise refusal(path, fault, hint="the file is of another model")


def _read_rank(path: Path, rank: str, layers: object) -> dict[int, torch.Tensor]:
    if not isinstance(layers, dict):
        raise refusal(
            path, f"kv_cache.scaling_factor.{rank} is not an object of layers: {layers!a:.60}"
        )
    wrong = [ascii(key)[:40] for key in layers if not _INDEX.fullmatch(key)]
    if wrong:
        raise refusal(path, f"kv_cache.scaling_factor.{rank}: not layer indices: {cut_list(wrong)}")
    return {int(key): _read_number(path, rank, key, value) for key, value in layers.items()}


def _read_number(path: Path, rank: str, layer: str, value: object) -> torch.Tensor:
    where = f"layer {layer} of {rank if rank.startswith('rank') else f'rank {rank}'}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise refusal(path, f"{where}: {value!a:.60} is not a number")
    try:
        number = torch.tensor(float(value), dtype=torch.float64)
    except OverflowError:
        raise refusal(path, f"{where}: the number is too large for a scale") from None
    check_scales(path, where, number)
    scale = number.float()
    check_scales(path, where, scale)
    return scale
