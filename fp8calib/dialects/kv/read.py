"""From any scales file or checkpoint to a `ScaleTable`, strictly.

The dialect is recognised by the names of the tensors first, by the config second. Weights need not
be there: of safetensors files only the headers and the scales themselves are read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fp8calib.checkpoint.checkpoint import CONFIG_NAME
from fp8calib.checkpoint.links import refuse_external_links
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.kv.config import read_config
from fp8calib.dialects.kv.json import is_scales_json, load_object, read_json
from fp8calib.dialects.kv.rank_files import list_tensor_names, read_ranks
from fp8calib.dialects.kv.read_tensors import list_indexed_scales, read_tensors
from fp8calib.dialects.kv.tensor_names import RANK_FILE_MARK, is_kv_scale_name
from fp8calib.dialects.kv.validate import (
    ParsedScales,
    cut_list,
    fill_shared,
    reading_errors,
    refusal,
)
from fp8calib.errors import UsageError, VerificationError
from fp8calib.fp8.formats import E4M3FN, E4M3FNUZ, Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role
from fp8calib.scales.compute import Scale, ScaleSource, ScaleTable
from fp8calib.stats.calibration_origin import CalibrationOrigin, explain_difference
from fp8calib.stats.calibration_stats import METADATA_KEY

KV_FORMATS = {fmt.name: fmt for fmt in (E4M3FN, E4M3FNUZ)}
_E4M3FN_DIALECTS = ("compressed-tensors", "autofp8", "modelopt", "quark")
"""Of tools that make no other KV scales: their names or their `quant_method` say it."""
_JSON_DIALECTS = ("vllm-json", "rfc")
_TENSOR_SUFFIXES = (".safetensors", ".npz")
_SCALES_JSON_WORDS = (b'"kv_cache"', b'"scaling_factor"')


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """The files that KV scales are looked for in, as far as they hold any."""

    place: Path
    tensor_files: tuple[Path, ...] = ()
    """All that can hold tensors, weights too."""
    rank_files: tuple[Path, ...] = ()
    json_files: tuple[Path, ...] = ()
    has_tensors: bool = False
    """Whether any tensor, or entry of the index, is called like a scale of an HF checkpoint."""

    @property
    def folder(self) -> Path:
        """The folder whose config describes the files."""
        return self.place if self.place.is_dir() else self.place.parent


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
    source = _look_into(path)
    found = _read(source, geometry, drops_bad_query=drops_bad_query)
    reading, shared = fill_shared(geometry, found)
    scales = {
        site: Scale(
            values=reading.values[site],
            source=ScaleSource.SHARED if site in shared else ScaleSource.OBSERVED,
        )
        for _, attention in geometry.attentions()
        for role in (Role.K, Role.V, Role.Q)
        if (site := attention.site(role)) in reading.values
    }
    table = ScaleTable(
        geometry=geometry,
        fmt=_agree_on_format(path, reading, asked, needs_dtype=needs_dtype),
        tp=reading.tp,
        per_head=reading.per_head,
        scales=scales,
        origin=reading.origin,
    )
    return FoundScales(
        dialect=reading.dialect,
        table=table,
        has_weights=reading.has_weights,
        files=reading.files,
        notes=(*reading.notes, *_explain_expanded(reading, geometry)),
    )


def _explain_expanded(reading: ParsedScales, geometry: ModelGeometry) -> Iterator[str]:
    """Tell of scales that ModelOpt itself measured on the arguments of latent attention."""
    is_foreign = reading.dialect == "modelopt" and reading.origin is None
    if is_foreign and geometry.has_latent_attention:
        yield (
            "ModelOpt measures K and V of latent attention expanded to heads; where an engine "
            "caches the latents instead, calibrate them"
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
    """Tell whether a folder or file has any KV scale to read, by names alone.

    Raises:
        UsageError: there is no such path.
        VerificationError: a file is damaged, so that nothing can be told.
    """
    source = _look_into(path)
    return source.has_tensors or bool(source.rank_files or source.json_files)


def _read(source: _Source, geometry: ModelGeometry, *, drops_bad_query: bool) -> ParsedScales:
    if source.rank_files:
        config = read_config(source.folder, geometry)
        return read_ranks(source.place, source.rank_files, geometry, config)
    if source.has_tensors:
        config = read_config(source.folder, geometry)
        with reading_errors():
            files = [TensorFile(path) for path in source.tensor_files]
        return read_tensors(source.place, files, geometry, config, drops_bad_query=drops_bad_query)
    if len(source.json_files) > 1:
        names = cut_list([path.name for path in source.json_files])
        raise refusal(
            source.place, f"several files hold KV scales: {names}", hint="name one of them"
        )
    if source.json_files:
        return read_json(source.json_files[0], geometry)
    raise _no_scales(source)


def _look_into(path: Path) -> _Source:
    try:
        if not path.exists():
            raise UsageError(f"{path}: no such file or folder", hint="name a scales file")
        if path.is_dir():
            return _look_into_folder(path)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise VerificationError(f"{path}: cannot be read: {reason}") from error
    if path.is_file() and path.suffix in _TENSOR_SUFFIXES:
        return _sort_files(path, [path], [])
    if path.is_file() and path.suffix == ".json":
        is_scales = is_scales_json(load_object(path))
        return _Source(place=path, json_files=(path,) if is_scales else ())
    hint = "scales are read from a checkpoint folder, or a .safetensors, .json or .npz file"
    raise refusal(path, "not a scales file", hint=hint)


def _look_into_folder(folder: Path) -> _Source:
    with reading_errors():
        refuse_external_links(folder)
    visible = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    paths = [path for path in visible if path.is_file()]
    tensor_files = [path for path in paths if path.suffix in _TENSOR_SUFFIXES]
    json_files = [path for path in paths if path.suffix == ".json" and path.name != CONFIG_NAME]
    return _sort_files(folder, tensor_files, json_files)


def _sort_files(place: Path, tensor_files: list[Path], json_files: list[Path]) -> _Source:
    """Find out which of the files hold scales; JSON counts only where no tensor is one."""
    names = {path: list_tensor_names(path) for path in tensor_files}
    marked = [path for path in names if any(RANK_FILE_MARK in name for name in names[path])]
    has_tensors = bool(list_indexed_scales(place)) or any(
        is_kv_scale_name(name) for path in names for name in names[path]
    )
    return _Source(
        place=place,
        tensor_files=tuple(path for path in tensor_files if path.suffix == ".safetensors"),
        rank_files=tuple(marked),
        json_files=() if has_tensors else tuple(filter(_is_scales_file, json_files)),
        has_tensors=has_tensors,
    )


def _is_scales_file(path: Path) -> bool:
    """Tell whether a JSON file of a folder is about KV scales, without parsing the others."""
    raw = path.read_bytes()
    return all(word in raw for word in _SCALES_JSON_WORDS) and is_scales_json(load_object(path))


def _no_scales(source: _Source) -> VerificationError:
    with reading_errors():
        files = [TensorFile(path) for path in source.tensor_files]
    if any(METADATA_KEY in file.header.metadata for file in files):
        hint = "these are statistics: `fp8calib export` makes scales of them"
    elif any(file.tensors for file in files):
        hint = "the weights come without scales; `fp8calib calibrate` makes them"
    else:
        hint = "expected *.k_scale and *.v_scale tensors, rank files, or a JSON with `kv_cache`"
    return refusal(source.place, "there are no KV scales", hint=hint)


def _find_source_format(source_dtype: str | None) -> Fp8Format | None:
    if source_dtype is not None and source_dtype not in KV_FORMATS:
        known = " or ".join(KV_FORMATS)
        raise UsageError(f"--source-dtype {source_dtype}: unknown", hint=f"it is {known}")
    return KV_FORMATS[source_dtype] if source_dtype is not None else None


def _agree_on_format(
    path: Path, reading: ParsedScales, asked: Fp8Format | None, *, needs_dtype: bool
) -> Fp8Format:
    named = reading.fmt
    if named is not None and asked is not None and named is not asked:
        fault = f"the scales are for {named.name}, as is written there, not {asked.name}"
        raise refusal(path, fault, hint="leave --source-dtype out")
    if named is not None or asked is not None:
        return named or asked or E4M3FN
    if needs_dtype and reading.dialect not in _E4M3FN_DIALECTS:
        raise UsageError(
            f"{path}: nothing says which FP8 format these scales ({reading.dialect}) are for",
            hint="--source-dtype e4m3fn (all but AMD's MI300) or --source-dtype e4m3fnuz says it",
        )
    if reading.dialect in _JSON_DIALECTS:
        raise refusal(path, "there is no kv_cache.dtype", hint="engines refuse the file for it")
    return E4M3FN
