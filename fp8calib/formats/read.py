"""Read the KV scales of any file or checkpoint into a `ScaleTable`, strictly.

The dialect is recognised by tensor names first, by the config second. Only headers and scales are
read, so the weights may be missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.calibration.origin import (
    METADATA_KEY,
    CalibrationOrigin,
    explain_difference,
    spell_export,
)
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.json_files import is_result, load_json_object, parse_unique_keys
from fp8calib.checkpoint.locations import refuse_external_links, require_path
from fp8calib.checkpoint.model_config import CONFIG_NAME, list_inner_checkpoints
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.errors import ModelError, UsageError, name_ranges, refusal
from fp8calib.formats.dialect import Dialect, ParsedScales, ScaleFiles
from fp8calib.formats.kv.config import load_config
from fp8calib.formats.kv.parse_names import RANK_FILE_MARK, find_spelling
from fp8calib.formats.kv.read_ranks import read_npz
from fp8calib.formats.kv.read_tensors import list_indexed_scales
from fp8calib.formats.registry import list_json_keys, list_read
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable
from fp8calib.model.geometry import KV_ROLES, ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN, Fp8Format

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

_TENSOR_SUFFIXES = (".safetensors", ".npz")
_RESULT_HINT = "name the checkpoint, the scales or the statistics that it is about"


def read_scales(
    path: Path,
    geometry: ModelGeometry,
    *,
    source_fmt: Fp8Format | None = None,
    needs_dtype: bool = False,
    drops_bad_query: bool = False,
    fills_layers: bool = False,
) -> ScaleTable:
    """Read the KV scales of a checkpoint folder or of one file, in any dialect.

    The folder holds a checkpoint, rank files, or one JSON file; a file is a `.safetensors`, `.json`
    or `.npz`. `source_fmt` is the FP8 format of scales that do not name theirs; their values do not
    change. Scales whose format nothing determines are for e4m3fn, or refused if `needs_dtype`. If a
    `q_scale` is not valid, `drops_bad_query` leaves out q and notes it. A layer without scale
    tensors, for which engines use 1.0, gets 1.0 if `fills_layers`; else the file is refused.

    Raises:
        UsageError: there is no such path, or `source_fmt` is needed.
        ModelError: there are no scales, or they are incomplete, invalid or of another model.
    """
    files, dialect = require_kv_scales(path)
    files = replace(files, drops_bad_query=drops_bad_query, fills_layers=fills_layers)
    assert dialect.read is not None  # noqa: S101 -- whatever is recognised is read
    parsed = dialect.read(files, geometry)
    values, sources, notes = _fill_shared(geometry, parsed)
    sources |= dict.fromkeys(parsed.filled, "defaulted")
    scales = {
        site: Scale(values=values[site], source=sources.get(site, "observed"))
        for _, attention in geometry.attentions()
        for role in (Role.K, Role.V, Role.Q)
        if (site := attention.site(role)) in values
    }
    return ScaleTable(
        geometry=geometry,
        fmt=_agree_on_format(path, dialect, parsed.fmt, source_fmt, needs_dtype=needs_dtype),
        tp=parsed.tp,
        per_head=parsed.per_head,
        scales=scales,
        origin=parsed.origin,
        dialect=dialect.name,
        has_weights=parsed.has_weights,
        files=parsed.files,
        notes=(*parsed.notes, *notes),
    )


def _fill_shared(
    geometry: ModelGeometry, parsed: ParsedScales
) -> tuple[dict[Site, torch.Tensor], dict[Site, ScaleSource], list[str]]:
    """Give layers that read another layer's cache its scale: all scales, new sources, notes."""
    values = dict(parsed.values)
    shared: dict[Site, ScaleSource] = {}
    differing: list[int] = []
    for layer, attention in geometry.attentions():
        producer = geometry.producer_of(attention)
        if producer is attention:
            continue
        for role in KV_ROLES:
            site, theirs = attention.site(role), values[producer.site(role)]
            if site not in values:
                values[site], shared[site] = theirs, "absent"
            elif values[site].equal(theirs):
                shared[site] = "shared"
            elif layer.index not in differing:
                differing.append(layer.index)
    notes = [
        f"{name_ranges(differing)}: the scales differ from those of the layer whose cache is read; "
        "they are kept, but an engine that uses them misreads the cache"
    ]
    return values, shared, notes if differing else []


def check_origin(name: str, origin: CalibrationOrigin | None, fingerprint: str) -> None:
    """Refuse scales that record another model; most tools record none.

    `fingerprint` belongs to the unquantized model that the scales are used for.

    Raises:
        ModelError: naming the difference.
    """
    if origin is not None and origin.model != fingerprint:
        difference = explain_difference(origin.model, fingerprint)
        raise ModelError(
            f"{name}: these scales are of another model: {difference}",
            hint="scales fit only the model they were calibrated on: calibrate this one",
        )


def has_kv_scales(path: Path) -> bool:
    """Tell whether a folder or file has KV scales, in any dialect; refuse a damaged one."""
    return _recognise(path)[1] is not None


def require_kv_scales(path: Path) -> tuple[ScaleFiles, Dialect]:
    """Find the scales in a folder or file, and their dialect; their values are not judged.

    Raises:
        UsageError: there is no such path.
        ModelError: there are no scales, or a file is damaged.
    """
    files, dialect = _recognise(path)
    if dialect is None:
        raise _no_scales(files)
    return files, dialect


def refuse_result(path: Path) -> ModelError:
    """Make the error for the report of a command where scales are asked for."""
    return refusal(path, "the result of a command, not scales", hint=_RESULT_HINT)


def _recognise(path: Path) -> tuple[ScaleFiles, Dialect | None]:
    files = _look_into(path)
    dialects = (each for each in list_read() if each.recognise and each.recognise(files))
    return files, next(dialects, None)


def _look_into(path: Path) -> ScaleFiles:
    require_path(path, hint="name a scales file")
    try:
        if path.is_dir():
            refuse_external_links(path)
            visible = (each for each in sorted(path.iterdir()) if not each.name.startswith("."))
            return _find_scales(path, [each for each in visible if each.is_file()])
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: cannot be read: {reason}") from error
    if path.is_file() and path.suffix in _TENSOR_SUFFIXES:
        return _find_scales(path, [path])
    if path.is_file() and path.suffix == ".json":
        document = load_json_object(path, parse=parse_unique_keys)
        is_scales = any(keys[0] in document for keys in list_json_keys())
        documents = {path: document} if is_scales else {}
        return ScaleFiles(place=path, tensor_names={}, documents=documents)
    hint = "scales are read from a checkpoint folder, or a .safetensors, .json or .npz file"
    raise refusal(path, "not a scales file", hint=hint)


def _find_scales(place: Path, paths: list[Path]) -> ScaleFiles:
    """Look for scales in the names; JSON files count only if no tensor is a scale."""
    tensor_files = [path for path in paths if path.suffix in _TENSOR_SUFFIXES]
    json_files = [path for path in paths if path.suffix == ".json" and path.name != CONFIG_NAME]
    tensor_names = {
        path: read_npz(path, lambda _: False) if path.suffix == ".npz" else TensorFile(path).tensors
        for path in tensor_files
    }
    names = [name for listed in tensor_names.values() for name in listed]
    found = map(find_spelling, [*names, *list_indexed_scales(place)])
    spellings = frozenset(spelling for spelling in found if spelling is not None)
    has_tensors = bool(spellings) or any(RANK_FILE_MARK in name for name in names)
    folder = place if place.is_dir() else place.parent
    return ScaleFiles(
        place=place,
        tensor_names=tensor_names,
        documents={} if has_tensors else dict(_load_documents(json_files)),
        spellings=spellings,
        config=load_config(folder / CONFIG_NAME) if has_tensors else None,
    )


def _load_documents(json_files: list[Path]) -> Iterator[tuple[Path, dict[str, object]]]:
    """Load the JSON files that have the keys of a dialect; other files are not parsed."""
    for path in json_files:
        raw = path.read_bytes()
        found = {
            keys for keys in list_json_keys() if all(f'"{key}"'.encode() in raw for key in keys)
        }
        document = load_json_object(path, parse=parse_unique_keys) if found else {}
        if any(keys[0] in document for keys in found):
            yield path, document


def _no_scales(files: ScaleFiles) -> ModelError:
    if inner := list_inner_checkpoints(files.place):
        hint = f"name one of the checkpoints in it, such as {inner[0]}"
        return refusal(files.place, "there are no KV scales in the folder itself", hint=hint)
    if files.place.is_file() and is_result(files.place):
        return refuse_result(files.place)
    opened = [read_header(path) for path in files.tensor_names if path.suffix == ".safetensors"]
    if any(METADATA_KEY in metadata for _, metadata in opened):
        hint = f"these are statistics: {spell_export(files.place)} makes scales from them"
    elif any(tensors for tensors, _ in opened):
        hint = "there are only weights; `fp8calib calibrate MODEL --out DIR` makes scales"
    else:
        hint = "expected *.k_scale and *.v_scale tensors, rank files, or a JSON with `kv_cache`"
    return refusal(files.place, "there are no KV scales", hint=hint)


def _agree_on_format(
    path: Path,
    dialect: Dialect,
    named: Fp8Format | None,
    given: Fp8Format | None,
    *,
    needs_dtype: bool,
) -> Fp8Format:
    if named is not None and given is not None and named is not given:
        fault = f"it states that its scales are for {named.name}, not {given.name}"
        raise refusal(path, fault, hint="leave out --source-dtype")
    if named is not None or given is not None:
        return named or given or E4M3FN
    if needs_dtype and len(dialect.formats) > 1:
        raise UsageError(
            f"{path}: the FP8 format of these scales ({dialect.name}) is not stated",
            hint="use --source-dtype e4m3fn, or e4m3fnuz (scales for AMD's MI300)",
        )
    if dialect.requires_dtype:
        raise refusal(path, "there is no kv_cache.dtype", hint="engines refuse the file for it")
    return dialect.formats[0]
