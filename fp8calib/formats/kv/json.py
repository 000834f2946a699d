"""`vllm-json` and `rfc`: JSON files with a scale for every layer of each rank.

`vllm-json` is the scales file of vLLM 0.4 to 0.6, which SGLang still parses: `QuantParamSchema`
(vLLM `quantization/schema.py`, SGLang `model_loader/weight_utils.py`). Its readers use either the
whole file or, after one line in the log, 1.0 for every layer: keys must be integers, every layer
and rank must be present, and `model_type` must equal the config's.

`rfc` is the JSON of vLLM's FP8 schema RFC (discussions #3218 and #2461), to the letter.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, WriteJob
from fp8calib.model.geometry import Role, Site

if TYPE_CHECKING:
    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.geometry import Layer, ModelGeometry, Section

_RANK = "rank"
_NO_CACHE_SCALE = 1.0
"""The scale of layers without K and V: readers require every layer's index."""


def name_rank_files(tp: int) -> dict[str, str]:
    """Name the file of quantized weights of each rank."""
    return {f"{_RANK}{rank}": f"rfc.tp{tp}.rank{rank}.safetensors" for rank in range(tp)}


def _write(job: WriteJob, path: Path) -> None:
    """Write one scale per layer, for k and v, and for each rank."""
    job.save_json(path, _make_document(job.table))


def _write_rfc(job: WriteJob, path: Path) -> None:
    """Write KV, MLP and attention scales for each rank; unknown ones are left out."""
    linears = job.linears
    sections: tuple[Section, ...] = ("mlp", "attention")
    document: dict[str, object] = {
        **_make_document(job.table, prefix=_RANK),
        **({} if linears is None else {name: _make_section(linears, name) for name in sections}),
        **({"quantized_weights": name_rank_files(job.table.tp)} if job.with_rank_weights else {}),
    }
    job.save_json(path, document)


def _make_document(table: ScaleTable, *, prefix: str = "") -> dict[str, object]:
    factors = {
        f"{prefix}{rank}": {
            str(layer.index): table.kv(layer.attention, rank)
            if layer.attention
            else _NO_CACHE_SCALE
            for layer in table.geometry.layers
        }
        for rank in range(table.tp)
    }
    kv_cache = {"dtype": table.fmt.dtype_name, "scaling_factor": factors}
    return {"model_type": table.geometry.model_type, "kv_cache": kv_cache}


def _make_section(table: ScaleTable, section: Section) -> dict[str, object]:
    dtype = table.fmt.dtype_name
    # the 16-bit dtype of activations in a server: fp32 checkpoints are served in bf16
    served = "float16" if table.geometry.checkpoint_dtype == "float16" else "bfloat16"
    return {
        "activation": {
            "dtype": served,
            "target_dtype": dtype,
            "scaling_factor": _list_factors(table, section, Role.INPUT),
        },
        "weight": {
            "dtype": dtype,
            "scaling_factor": _list_factors(table, section, Role.WEIGHT),
        },
    }


def _list_factors(
    table: ScaleTable, section: Section, role: Role
) -> dict[str, dict[str, dict[str, float]]]:
    """List rank -> layer -> projection -> scale; a layer without such projections has no entry."""
    sites = {layer.index: _list_sites(layer, section, role) for layer in table.geometry.layers}
    return {
        f"{_RANK}{rank}": {
            str(index): {key: float(table.scales[site].values[rank]) for key, site in found.items()}
            for index, found in sites.items()
            if found
        }
        for rank in range(table.tp)
    }


def _list_sites(layer: Layer, section: Section, role: Role) -> dict[str, Site]:
    return {
        linear.key(part, expert): Site(linear.logical(part, expert), role)
        for linear in layer.linears
        if linear.section == section
        for expert in linear.experts
        for part in linear.parts
    }


def _has_rank_keys(document: dict[str, object]) -> bool:
    kv_cache = document.get("kv_cache")
    factors = kv_cache.get("scaling_factor") if isinstance(kv_cache, dict) else None
    return isinstance(factors, dict) and all(key.startswith(_RANK) for key in factors)


def _read(files: ScaleFiles, geometry: ModelGeometry, *, is_rfc: bool = False) -> ParsedScales:
    from fp8calib.formats.kv.read_ranks import read_json  # noqa: PLC0415 -- imports numpy

    return read_json(files, geometry, rank_prefix=_RANK if is_rfc else "")


VLLM_JSON = Dialect(
    name="vllm-json",
    description="one block per rank, every layer, for vLLM 0.4 to 0.6; SGLang misreads it",
    path_pattern="kv_cache_scales.tp{tp}.json",
    write=_write,
    recognise=lambda files: any("kv_cache" in document for document in files.documents.values()),
    read=_read,
    requires_dtype=True,
    json_keys=("kv_cache", "scaling_factor"),
    per_tp=True,
    joins_kv=True,
    lists_all_layers=True,
    unread="vLLM since 0.7 does not read this file, and SGLang misreads it",
)
RFC = replace(
    VLLM_JSON,
    name="rfc",
    description="vLLM's FP8 RFC (discussions 2461, 3218) to the letter: `kv_cache`, `mlp`, "
    "`attention`",
    path_pattern="rfc.tp{tp}.json",
    write=_write_rfc,
    recognise=lambda files: any(map(_has_rank_keys, files.documents.values())),
    read=lambda files, geometry: _read(files, geometry, is_rfc=True),
    has_linears=True,
    unread="no engine reads a file with the RFC's keys: those that try run with scale 1.0",
)
