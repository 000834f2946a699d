"""`lightllm` and `lightllm-head`: LightLLM's `kv_cache_calib.json`, per tensor and per head.

Source: `lightllm/common/kv_cache_mem_manager/` of LightLLM 88b2fc6 (`export_calibration_...`,
`fp8_static_per_head_...`, `fp8_static_per_tensor_quant_mem_manager.py`). A row of `scales` is a
layer: of k and v, or of all KV heads of k and then those of v. `q_calibration` has a scale for each
KV head, which covers the query heads of its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fp8calib.errors import cut_list, refusal
from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles, WriteJob
from fp8calib.model.geometry import Role
from fp8calib.numerics.formats import E4M3FN

if TYPE_CHECKING:
    import torch

    from fp8calib.model.geometry import Attention, ModelGeometry

PER_HEAD, PER_TENSOR = "per_head", "per_tensor"
QUERY = "q_calibration"


def find_misfit(geometry: ModelGeometry) -> str:
    """Say why LightLLM's file has no place for the scales of a model; empty if it has."""
    attentions = [attention for _, attention in geometry.attentions()]
    if any(attention.kind == "latent" for attention in attentions):
        return "LightLLM quantizes latents itself, without scales of a file"
    if any(attention.producer is not None for attention in attentions):
        return "how LightLLM counts layers that read another layer's cache was not read"
    if len({attention.num_kv_heads for attention in attentions}) > 1:
        return "its layers have different numbers of KV heads, which one table does not hold"
    return ""


def _write(job: WriteJob, path: Path) -> None:
    """Write the scales of every layer with a KV cache, in order."""
    table = job.table
    attentions = [attention for _, attention in table.geometry.attentions()]

    def find(attention: Attention, role: Role) -> Any:
        return table.scales[attention.site(role)].values[0].reshape(-1)

    rows = [[*find(each, Role.K).tolist(), *find(each, Role.V).tolist()] for each in attentions]
    heads = attentions[0].num_kv_heads if attentions else 0
    query: dict[str, object] = {}
    if table.per_head and attentions and attentions[0].site(Role.Q) in table.scales:
        of_groups = [find(each, Role.Q).view(heads, -1).amax(-1).tolist() for each in attentions]
        query = {QUERY: {"num_head": heads, **_shape(of_groups)}}
    document = {
        "version": "1.0",
        "architectures": table.geometry.architecture,
        "quant_type": PER_HEAD if table.per_head else PER_TENSOR,
        "qmin": -table.fmt.max,
        "qmax": table.fmt.max,
        "num_layers": len(rows),
        "num_head": heads,
        **_shape(rows),
        **query,
    }
    job.save_json(path, document)


def _shape(rows: Sequence[Sequence[float]]) -> dict[str, object]:
    return {"scales_shape": [len(rows), len(rows[0]) if rows else 0], "scales": list(rows)}


def _recognise(files: ScaleFiles) -> bool:
    return any("quant_type" in document for document in files.documents.values())


def _read(files: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    from fp8calib.formats.metadata import parse_origin  # noqa: PLC0415

    if len(files.documents) > 1:
        names = cut_list([path.name for path in files.documents])
        raise refusal(files.place, f"several files hold KV scales: {names}", hint="name one")
    ((path, document),) = files.documents.items()
    if misfit := find_misfit(geometry):
        raise refusal(path, misfit)
    if "layouts" in document:
        raise refusal(path, "`layouts` of drafts with other heads are not read")
    if (document.get("qmin"), document.get("qmax")) != (-E4M3FN.max, E4M3FN.max):
        raise refusal(path, f"qmin and qmax are not those of {E4M3FN.name}, ±{E4M3FN.max:g}")
    per_head = document.get("quant_type") == PER_HEAD
    if not per_head and document.get("quant_type") != PER_TENSOR:
        raise refusal(path, f"quant_type is neither {PER_HEAD} nor {PER_TENSOR}")
    attentions = [attention for _, attention in geometry.attentions()]
    heads = attentions[0].num_kv_heads if attentions else 0
    if document.get("num_head") != heads:
        fault = f"num_head is {document.get('num_head')!a:.40}, the model has {heads} KV heads"
        raise refusal(path, fault, hint="the scales are of another model")
    width = heads if per_head else 1
    drafts = document.get("num_draft_layers", 0)
    drafts = drafts if isinstance(drafts, int) and not isinstance(drafts, bool) else 0
    rows = _read_rows(path, document, "scales", len(attentions), 2 * width, more=drafts)
    values = {
        attention.site(role): row[part * width : (part + 1) * width].reshape(
            (1, width) if per_head else (1,)
        )
        for attention, row in zip(attentions, rows, strict=True)
        for part, role in enumerate((Role.K, Role.V))
    }
    query = document.get(QUERY) if per_head else None
    if query is not None:
        if not isinstance(query, dict):
            raise refusal(path, f"{QUERY} is no object")
        groups = _read_rows(path, query, f"{QUERY}.scales", len(attentions), heads, more=drafts)
        for attention, row in zip(attentions, groups, strict=True):
            each = row.repeat_interleave(attention.num_heads // heads)
            values[attention.site(Role.Q)] = each.unsqueeze(0)
    return ParsedScales(
        values=values,
        per_head=per_head,
        fmt=E4M3FN,
        origin=parse_origin(path, document),
        files=(path,),
        notes=(f"the scales of a draft ({drafts}) are left out",) if drafts else (),
    )


def _read_rows(
    path: Path, document: Mapping[str, Any], where: str, count: int, width: int, *, more: int
) -> torch.Tensor:
    """Read the rows [count, width] of layers, before `more` of a draft."""
    import torch  # noqa: PLC0415

    from fp8calib.formats.kv.validate import OTHER_MODEL, check_scales  # noqa: PLC0415

    rows: Any = document.get("scales")
    if document.get("scales_shape") != [count + more, width]:
        shape = document.get("scales_shape")
        fault = f"{where}: scales_shape is {shape!a:.40}, not {[count + more, width]}"
        raise refusal(path, fault, hint=OTHER_MODEL)
    is_list = isinstance(rows, list) and len(rows) == count + more
    if not is_list or not all(isinstance(row, list) and len(row) == width for row in rows):
        raise refusal(path, f"{where}: not a table of its scales_shape")
    if any(isinstance(each, bool) or not isinstance(each, int | float) for r in rows for each in r):
        raise refusal(path, f"{where}: not all are numbers")
    try:
        found = torch.tensor(rows, dtype=torch.float64)
    except (OverflowError, RuntimeError):
        raise refusal(path, f"{where}: a number is too large for a scale") from None
    check_scales(path, where, found)
    check_scales(path, where, found.float())
    return found.float()[:count]


LIGHTLLM = Dialect(
    name="lightllm",
    description="LightLLM's scales file, `per_tensor`, for `--llm_kv_type fp8kv_spt`",
    path_pattern="kv_cache_calib.json",
    write=_write,
    recognise=_recognise,
    read=_read,
    formats=(E4M3FN,),
    json_keys=("quant_type", "scales_shape"),
    find_misfit=find_misfit,
)
LIGHTLLM_HEAD = replace(
    LIGHTLLM,
    name="lightllm-head",
    description="the same with one scale per KV head, and `q_calibration`, for `fp8kv_sph`",
    path_pattern="kv_cache_calib_per_head.json",
    recognise=None,
    read=None,
    per_head=True,
    has_query=True,
)
"""Read as `lightllm`."""
