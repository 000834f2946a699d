"""Read KV scales stored as tensors, in every tool's spelling."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.weight_index import INDEX_NAME, read_index
from fp8calib.errors import cut_list, name_ranges, refusal
from fp8calib.formats.dialect import ParsedScales, ScaleFiles, Spelling
from fp8calib.formats.kv.config import read_config
from fp8calib.formats.kv.parse_names import ScaleName, find_owners, find_spelling, parse_name
from fp8calib.formats.kv.validate import (
    ONE_FILLS_BOTH,
    check_scales,
    is_query_scale,
    missing_layers,
)
from fp8calib.formats.metadata import DTYPE_KEY, find_format, find_origin
from fp8calib.model.geometry import KV_ROLES, Attention, ModelGeometry, Role, Site
from fp8calib.numerics.formats import Fp8Format

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

_PARAMETERS_OF_WEIGHTS = ("_scale", "_zero_point")
_BIASES = (".k_proj.k_bias", ".v_proj.v_bias")
"""What ModelOpt's affine KV cache subtracts before it divides by a scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stored:
    """A scale that was read, with its name, file and layer."""

    name: ScaleName
    file: TensorFile
    attention: Attention
    values: torch.Tensor
    """fp32 [1], or [1, heads]."""

    def __str__(self) -> str:
        """Show the name, the numbers and the file."""
        shown = cut_list(self.values.flatten().tolist())
        return f"{self.name.full} = {shown} ({self.file.path.name})"


def read_tensors(found: ScaleFiles, geometry: ModelGeometry) -> ParsedScales:
    """Read the scale tensors of a checkpoint or file, in any tool's spelling."""
    place, (fmt, _) = found.place, read_config(found, geometry)
    files = [TensorFile(path) for path in found.tensor_names if path.suffix == ".safetensors"]
    listed, held = list_indexed_scales(place), {name for file in files for name in file.tensors}
    if absent := [name for name in listed if name not in held]:
        where = cut_list(sorted({listed[name] for name in absent}))
        fault = f"the index lists {len(absent)} scales that no file has ({cut_list(absent)})"
        raise refusal(place, fault, hint=f"they should be in {where}; complete the download")
    if biases := sorted(name for name in held if name.endswith(_BIASES)):
        fault = f"the scales are of K and V less a bias ({cut_list(biases)})"
        raise refusal(place, fault, hint="engines read only symmetric KV scales")
    named = [
        (parsed, file)
        for file in files
        for parsed in map(parse_name, file.tensors)
        if parsed is not None
    ]
    owners = find_owners(place, geometry, [name for name, _ in named])
    scales: list[_Stored] = []
    with ExitStack() as stack:
        for file in files:
            stack.callback(file.close)
            file.fetch(name.full for name, held in named if held is file)
        for name, file in named:
            if name in owners:
                stored = _read(name, file, owners[name], found.drops_bad_query)
                if name.spelling is not Spelling.ZERO_POINT:
                    scales.append(stored)
    queries = (item for item in scales if found.drops_bad_query and Role.Q in item.name.roles)
    bad = [each for each in queries if not all(map(is_query_scale, each.values.flatten().tolist()))]
    if bad:
        scales = [item for item in scales if Role.Q not in item.name.roles]
    values = _merge(place, scales)
    filled = _fill_layers(geometry, values) if found.fills_layers else {}
    per_head = _check_whole(place, geometry, values | filled)
    holding = [item.file for item in scales]
    notes = []
    if Spelling.SINGLE in {item.name.spelling for item in scales}:
        notes.append(ONE_FILLS_BOTH)
    if ignored := [name.full for name, _ in named if name not in owners]:
        notes.append(f"{len(ignored)} scales outside the decoder are ignored ({cut_list(ignored)})")
    if bad:
        notes.append(
            f"q_scale is left out: {bad[0]} is not a scale (llm-compressor leaves it unset "
            "when it quantizes attention)"
        )
    return ParsedScales(
        values=values | filled,
        filled=filled,
        per_head=per_head,
        fmt=_find_format(place, fmt, holding),
        origin=find_origin(place, holding),
        has_weights=any(
            entry.dtype.startswith("F8_") and not name.endswith(_PARAMETERS_OF_WEIGHTS)
            for file in files
            for name, entry in file.tensors.items()
        ),
        files=tuple(dict.fromkeys(file.path for file in holding)),
        notes=tuple(notes),
    )


def _find_format(
    place: Path, configured: Fp8Format | None, files: Iterable[TensorFile]
) -> Fp8Format | None:
    """Find the format that the config or the files name."""
    named = {configured} - {None}
    for file in files:
        if (dtype := file.metadata.get(DTYPE_KEY)) is not None:
            named.add(find_format(file.path, DTYPE_KEY, dtype))
    if len(named) > 1:
        names = cut_list(sorted(fmt.name for fmt in named if fmt))
        raise refusal(place, f"config and files name several formats: {names}")
    return named.pop() if named else None


def list_indexed_scales(place: Path) -> dict[str, str]:
    """List the KV scales that a folder's index names, each with its file."""
    path = place / INDEX_NAME
    if not path.is_file():
        return {}
    weight_map = read_index(path)["weight_map"]
    return {name: file for name, file in weight_map.items() if find_spelling(name)}


def _read(
    name: ScaleName, file: TensorFile, attention: Attention, drops_bad_query: bool
) -> _Stored:
    entry, path, full = file.tensors[name.full], file.path, name.full
    heads = attention.num_heads if Role.Q in name.roles else attention.num_kv_heads
    is_single, is_scale = name.spelling is Spelling.SINGLE, name.spelling is not Spelling.ZERO_POINT
    has_shape = entry.shape in ((), (1,)) or (entry.shape == (heads, 1, 1) and not is_single)
    if not has_shape or (is_scale and not file.dtype(full).is_floating_point):
        fault = f"{full} is {entry.dtype} of shape {list(entry.shape)}"
        per_head = "" if is_single else f", or one per head [{heads}, 1, 1] for this model"
        raise refusal(path, fault, hint=f"a scale is one float{per_head}")
    values = file.read(full).float().reshape((1, heads) if entry.shape[1:] else (1,))
    if is_scale and not (drops_bad_query and Role.Q in name.roles):
        check_scales(path, full, values, stored=entry.dtype)
    elif not is_scale and bool((values != 0).any()):
        raise refusal(path, f"{full} is not zero", hint="engines read only symmetric KV scales")
    return _Stored(name=name, file=file, attention=attention, values=values)


def _merge(place: Path, scales: Sequence[_Stored]) -> dict[Site, torch.Tensor]:
    """Merge the spellings of each scale."""
    merged: dict[Site, _Stored] = {}
    singles: dict[Site, _Stored] = {}
    for stored in scales:
        target = singles if stored.name.spelling is Spelling.SINGLE else merged
        for role in stored.name.roles:
            site = stored.attention.site(role)
            other = target.setdefault(site, stored)
            if not other.values.equal(stored.values):
                fault = f"two scales for {site}: {other} and {stored}"
                raise refusal(place, fault, hint="keep the one that was calibrated")
    values = {site: stored.values for site, stored in merged.items()}
    for module in dict.fromkeys(site.module for site in singles):
        single = singles[Site(module, Role.K)]
        pair = [values[site] for role in KV_ROLES if (site := Site(module, role)) in values]
        if not pair:
            values |= {Site(module, role): single.values for role in KV_ROLES}
        elif max(float(part.max()) for part in pair) != float(single.values):
            own = " and ".join(str(cut_list(part.flatten().tolist())) for part in pair)
            fault = f"{single} is not the larger of k_scale and v_scale beside it ({own})"
            hint = "engines differ in which one they read; remove the wrong one"
            raise refusal(place, fault, hint=hint)
    return values


def _fill_layers(
    geometry: ModelGeometry, values: Mapping[Site, torch.Tensor]
) -> dict[Site, torch.Tensor]:
    """Give 1.0 to k and v, and to q where other layers have one, of the layers without a scale."""
    roles = {site.role for site in values}
    alike = {role: next(v for site, v in values.items() if site.role is role) for role in roles}
    filled = {}
    for attention in geometry.owners().values():
        sites = [attention.site(role) for role in roles]
        if not any(site in values for site in sites):
            for site in sites:
                heads = attention.num_heads if site.role is Role.Q else attention.num_kv_heads
                example = alike[site.role]
                filled[site] = example.new_ones((1, heads) if example.dim() == 2 else (1,))
    return filled


def _check_whole(place: Path, geometry: ModelGeometry, values: Mapping[Site, torch.Tensor]) -> bool:
    """Check that layers with a cache have k and v, others both or none, and q is in all or none.

    All scales are per tensor or per head, which is returned.
    """
    owners, attentions = geometry.owners(), list(geometry.attentions())
    have = {
        role: {layer.index for layer, each in attentions if each.site(role) in values}
        for role in (*KV_ROLES, Role.Q)
    }
    if neither := sorted(owners.keys() - have[Role.K] - have[Role.V]):
        raise missing_layers(place, neither, of=len(owners))
    indices = {layer.index for layer, _ in attentions} if have[Role.Q] else set[int]()
    for role, beside in ((Role.K, have[Role.V]), (Role.V, have[Role.K]), (Role.Q, indices)):
        if lacking := beside - have[role]:
            fault = f"there is no {role}_scale for {name_ranges(lacking)} beside other scales"
            command = "fp8calib calibrate MODEL --query-scale yes --out DIR"
            hint = f"engines use 1.0 or another scale there, or stop; `{command}` writes all"
            raise refusal(place, fault, hint=hint)
    scales = {scale.dim() == 2: f"{site}" for site, scale in values.items()}
    if len(scales) > 1:
        fault = f"both per-head scales ({scales[True]}) and per-tensor scales ({scales[False]})"
        raise refusal(place, fault, hint="engines read one or the other")
    return True in scales
