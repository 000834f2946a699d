"""`rfc`: the JSON of vLLM's FP8 schema RFC (discussions #3218 and #2461), to the letter."""

from __future__ import annotations

from pathlib import Path

from fp8calib.dialects.kv.json import describe_measurement, list_kv_scales, save_json
from fp8calib.dialects.kv.metadata import Provenance, name_dtype
from fp8calib.geometry.model_geometry import Layer, Section
from fp8calib.geometry.sites import Role, Site
from fp8calib.scales.compute import ScaleTable


def write_rfc(
    kv: ScaleTable,
    linears: ScaleTable | None,
    path: Path,
    *,
    provenance: Provenance | None = None,
    with_weights: bool = False,
) -> None:
    """Write KV, MLP and attention scales for each rank of the two tables, which is the same number.

    Without `linears` there is the `kv_cache` section alone; a provenance goes to the `_comment` at
    the top. `with_weights` names the files of `name_rank_files`, which lie beside this one.

    Raises:
        ExportError: the file cannot be written.
    """
    dtype = name_dtype(kv.fmt)
    factors = {f"rank{rank}": list_kv_scales(kv, rank) for rank in range(kv.tp)}
    sections: tuple[Section, ...] = ("mlp", "attention")
    document: dict[str, object] = {
        **({} if provenance is None else {"_comment": provenance.describe()}),
        "model_type": kv.geometry.model_type,
        "kv_cache": {"dtype": dtype, "scaling_factor": factors},
        **({} if linears is None else {name: _make_section(linears, name) for name in sections}),
        **({"quantized_weights": name_rank_files(kv.tp)} if with_weights else {}),
        **describe_measurement(kv),
    }
    save_json(path, document)


def name_rank_files(tp: int) -> dict[str, str]:
    """Name the file of quantized weights of each rank."""
    return {f"rank{rank}": f"rfc.tp{tp}.rank{rank}.safetensors" for rank in range(tp)}


def _make_section(table: ScaleTable, section: Section) -> dict[str, object]:
    dtype = name_dtype(table.fmt)
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
    """List rank -> layer -> projection -> scale; layers without such projections have no entry."""
    sites = {layer.index: _list_sites(layer, section, role) for layer in table.geometry.layers}
    return {
        f"rank{rank}": {
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
