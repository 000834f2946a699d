"""From any scales file or checkpoint to a `ScaleTable`, strictly.

The dialect is recognised by the names of the tensors first, by the config second. Weights need not
be there: of safetensors files only the headers and the scales themselves are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from fp8calib.checkpoint.links import refuse_external_links
from fp8calib.checkpoint.model_config import CONFIG_NAME
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.dialect import Dialect, ScaleFiles
from fp8calib.dialects.kv.config import load_object, read_quant_method
from fp8calib.dialects.kv.rank_files import list_tensor_names
from fp8calib.dialects.kv.read_tensors import list_indexed_scales
from fp8calib.dialects.kv.tensor_names import RANK_FILE_MARK, find_spelling
from fp8calib.dialects.kv.validate import fill_shared
from fp8calib.dialects.refusals import reading_errors, refusal
from fp8calib.dialects.registry import list_json_keys, list_read
from fp8calib.errors import UsageError, VerificationError
from fp8calib.fp8.formats import E4M3FN, KV_FORMATS, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role
from fp8calib.scales.compute import Scale, ScaleSource, ScaleTable
from fp8calib.stats.calibration_origin import CalibrationOrigin, explain_difference
from fp8calib.stats.calibration_stats import METADATA_KEY

_TENSOR_SUFFIXES = (".safetensors", ".npz")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundScales:
    """The KV scales of a file or checkpoint, and how they stood there."""

    dialect: str
    """`compressed-tensors` (also our kv-overlay), `tgi`, `kv-scales`, `vllm-json`, `rfc`,
    `autofp8`, `modelopt`, `quark` or `trtllm`."""
    table: ScaleTable
    """Scales of K and V, and of Q where they are there; `tp` is the number of ranks found."""
    has_weights: bool
    """The checkpoint holds FP8 weights as well."""
    files: tuple[Path, ...]
    """The files that held the scales."""
    notes: tuple[str, ...]
    """What a user should know of how the scales were read."""


def read_scales(
    path: Path,
    geometry: ModelGeometry,
    *,
    source_dtype: str | None = None,
    needs_dtype: bool = False,
    drops_bad_query: bool = False,
) -> FoundScales:
    """Read the KV scales of a checkpoint folder or of one file, in any dialect.

    Args:
        path: a folder (checkpoint, rank files, or one JSON), or a `.safetensors`, `.json` or
            `.npz` file.
        geometry: the model the scales are for.
        source_dtype: `e4m3fn` or `e4m3fnuz`, for files that do not say; values stay as they are.
        needs_dtype: refuse a file that neither names its format nor is of a tool that knows only
            e4m3fn, unless `source_dtype` is there; otherwise it is taken for e4m3fn.
        drops_bad_query: go without `q_scale` where one is not a scale, and say so.

    Raises:
        UsageError: there is no such path, no such dtype, or a dtype is needed.
        VerificationError: the scales are not complete, not valid, of another model, or not there.
    """
    asked = _find_source_format(source_dtype)
    files = _look_into(path, drops_bad_query=drops_bad_query)
    dialect = _recognise(files)
    if dialect is None or dialect.read is None:
        raise _no_scales(files)
    parsed, shared = fill_shared(geometry, dialect.read(files, geometry))
    scales = {
        site: Scale(
            values=parsed.values[site],
            source=ScaleSource.SHARED if site in shared else ScaleSource.OBSERVED,
        )
        for _, attention in geometry.attentions()
        for role in (Role.K, Role.V, Role.Q)
        if (site := attention.site(role)) in parsed.values
    }
    table = ScaleTable(
        geometry=geometry,
        fmt=_agree_on_format(path, dialect, parsed.fmt, asked, needs_dtype=needs_dtype),
        tp=parsed.tp,
        per_head=parsed.per_head,
        scales=scales,
        origin=parsed.origin,
    )
    return FoundScales(
        dialect=dialect.name,
        table=table,
        has_weights=parsed.has_weights,
        files=parsed.files,
        notes=parsed.notes,
    )


def check_origin(name: str, measured: CalibrationOrigin | None, fingerprint: str) -> None:
    """Refuse scales that say themselves that they are of another model; most tools do not say.

    Args:
        name: what the user called them.
        measured: what they say.
        fingerprint: of the unquantized model they are to be used for.

    Raises:
        VerificationError: saying what is different.
    """
    if measured is not None and measured.model != fingerprint:
        difference = explain_difference(measured.model, fingerprint)
        raise VerificationError(
            f"{name}: these scales are of another model: {difference}",
            hint="scales fit the model they were measured on alone: calibrate this one",
        )


def has_kv_scales(path: Path) -> bool:
    """Tell whether a folder or file has KV scales of any dialect.

    Raises:
        UsageError: there is no such path.
        VerificationError: a file is damaged, so that nothing can be told.
    """
    return _recognise(_look_into(path)) is not None


def _recognise(files: ScaleFiles) -> Dialect | None:
    for dialect in list_read():
        if dialect.recognise is not None and dialect.recognise(files):
            return dialect
    return None


def _look_into(path: Path, *, drops_bad_query: bool = False) -> ScaleFiles:
    found = replace(_list_files(path), drops_bad_query=drops_bad_query)
    if not found.spellings:
        return found
    method = read_quant_method(found.folder)
    return replace(found, quant_method=method or "", has_config=method is not None)


def _list_files(path: Path) -> ScaleFiles:
    try:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", hint="name a scales file")
        if path.is_dir():
            return _list_folder(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise VerificationError(f"{path}: cannot be read: {reason}") from error
    if path.is_file() and path.suffix in _TENSOR_SUFFIXES:
        return _sort_files(path, [path], [])
    if path.is_file() and path.suffix == ".json":
        document = load_object(path)
        documents = (
            {path: document} if any(keys[0] in document for keys in list_json_keys()) else {}
        )
        return ScaleFiles(place=path, tensor_names={}, documents=documents)
    hint = "scales are read from a checkpoint folder, or a .safetensors, .json or .npz file"
    raise refusal(path, "not a scales file", hint=hint)


def _list_folder(folder: Path) -> ScaleFiles:
    with reading_errors():
        refuse_external_links(folder)
    visible = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    paths = [path for path in visible if path.is_file()]
    tensor_files = [path for path in paths if path.suffix in _TENSOR_SUFFIXES]
    json_files = [path for path in paths if path.suffix == ".json" and path.name != CONFIG_NAME]
    return _sort_files(folder, tensor_files, json_files)


def _sort_files(place: Path, tensor_files: list[Path], json_files: list[Path]) -> ScaleFiles:
    """Find out which of the files hold scales; JSON counts only where no tensor is one."""
    tensor_names = {path: list_tensor_names(path) for path in tensor_files}
    names = [name for listed in tensor_names.values() for name in listed]
    found = map(find_spelling, [*names, *list_indexed_scales(place)])
    spellings = frozenset(spelling for spelling in found if spelling is not None)
    has_tensors = bool(spellings) or any(RANK_FILE_MARK in name for name in names)
    return ScaleFiles(
        place=place,
        tensor_names=tensor_names,
        documents={} if has_tensors else dict(_load_documents(json_files)),
        spellings=spellings,
    )


def _load_documents(json_files: list[Path]) -> Iterator[tuple[Path, dict[str, object]]]:
    """Load the JSON files that have the keys of a dialect, without parsing the others."""
    for path in json_files:
        raw = path.read_bytes()
        found = {
            keys for keys in list_json_keys() if all(f'"{key}"'.encode() in raw for key in keys)
        }
        document = load_object(path) if found else {}
        if any(keys[0] in document for keys in found):
            yield path, document


def _no_scales(files: ScaleFiles) -> VerificationError:
    with reading_errors():
        opened = [TensorFile(path) for path in files.tensor_names if path.suffix == ".safetensors"]
    if any(METADATA_KEY in file.header.metadata for file in opened):
        hint = "these are statistics: `fp8calib export` makes scales of them"
    elif any(file.tensors for file in opened):
        hint = "the weights come without scales; `fp8calib calibrate` makes them"
    else:
        hint = "expected *.k_scale and *.v_scale tensors, rank files, or a JSON with `kv_cache`"
    return refusal(files.place, "there are no KV scales", hint=hint)


def _find_source_format(source_dtype: str | None) -> Fp8Format | None:
    if source_dtype is not None and source_dtype not in KV_FORMATS:
        known = " or ".join(KV_FORMATS)
        raise UsageError(f"--source-dtype {source_dtype}: unknown", hint=f"it is {known}")
    return KV_FORMATS[source_dtype] if source_dtype is not None else None


def _agree_on_format(
    path: Path,
    dialect: Dialect,
    named: Fp8Format | None,
    asked: Fp8Format | None,
    *,
    needs_dtype: bool,
) -> Fp8Format:
    if named is not None and asked is not None and named is not asked:
        fault = f"the scales are for {named.name}, as is written there, not {asked.name}"
        raise refusal(path, fault, hint="leave --source-dtype out")
    if named is not None or asked is not None:
        return named or asked or E4M3FN
    if needs_dtype and len(dialect.formats) > 1:
        raise UsageError(
            f"{path}: nothing says which FP8 format these scales ({dialect.name}) are for",
            hint="--source-dtype e4m3fn (all but AMD's MI300) or --source-dtype e4m3fnuz says it",
        )
    if dialect.requires_dtype:
        raise refusal(path, "there is no kv_cache.dtype", hint="engines refuse the file for it")
    return dialect.formats[0]
