"""`rfc`: the JSON of vLLM's FP8 schema RFC (discussions #3218 and #2461), to the letter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.formats.dialect import ParsedScales, ScaleFiles, WriteJob
from fp8calib.formats.kv.json import VLLM_JSON, list_layer_scales
from fp8calib.model.shapes import Role, Site

if TYPE_CHECKING:
    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.shapes import Layer, ModelGeometry, Section

_RANK = "rank"


def _write(job: WriteJob, path: Path) -> None:
    """Write KV, MLP and attention scales for each rank, as far as they are known."""
    kv, linears = job.table, job.linears
    factors = {f"{_RANK}{rank}": list_layer_scales(kv, rank) for rank in range(kv.tp)}
    sections: tuple[Section, ...] = ("mlp", "attention")
    document: dict[str, object] = {
        "model_type": kv.geometry.model_type,
        "kv_cache": {"dtype": kv.fmt.dtype_name, "scaling_factor": factors},
        **({} if linears is None else {name: _make_section(linears, name) for name in sections}),
        **({"quantized_weights": name_rank_files(kv.tp)} if job.with_rank_weights else {}),
    }
    job.save_json(path, document)


def name_rank_files(tp: int) -> dict[str, str]:
    """Name the file of quantized weights of each rank."""
    return {f"{_RANK}{rank}": f"rfc.tp{tp}.rank{rank}.safetensors" for rank in range(tp)}


def _make_section(table: ScaleTable, section: Section) -> dict[str, object]:
    dtype = table.fmt.dtype_name
    return {
        "activation": {
            "dtype": _name_served_dtype(table.geometry.checkpoint_dtype),
            "target_dtype": dtype,
            "scaling_factor": _list_factors(table, section, Role.INPUT),
        },
        "weight": {
            "dtype": dtype,
            "scaling_factor": _list_factors(table, section, Role.WEIGHT),
        },
    }


def _name_served_dtype(checkpoint_dtype: str) -> str:
    """Name the 16-bit dtype activations have in a server; fp32 checkpoints are served in bf16."""
    return "float16" if checkpoint_dtype == "float16" else "bfloat16"


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


def _recognise(files: ScaleFiles) -> bool:
    return any(map(_has_rank_keys, files.documents.values()))


def _has_rank_keys(document: dict[str, object]) -> bool:
    kv_cache = document.get("kv_cache")
    factors = kv_cache.get("scaling_factor") if isinstance(kv_cache, dict) else None
    return isinstance(factors, dict) and all(key.startswith(_RANK) for key in factors)


def _read(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.formats.kv.read_json import read_json  # noqa: PLC0415 -- imports torch

    return read_json(files, geometry, rank_prefix=_RANK, requires_model_type=False)


RFC = replace(
    VLLM_JSON,
    name="rfc",
    description="vLLM's FP8 RFC (discussions 2461, 3218) to the letter: `kv_cache`, `mlp`, "
    "`attention`",
    path_pattern="rfc.tp{tp}.json",
    write=_write,
    recognise=_recognise,
    read=_read,
    has_linears=True,
)
