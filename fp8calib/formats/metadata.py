"""What fp8calib records in a file of scales: FP8 format, calibrated model and text, provenance.

Safetensors files hold it in the header's metadata, JSON files under a key at the top level. Engines
ignore both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib import __version__
from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.checkpoint.header import read_header
from fp8calib.checkpoint.json_files import load_json
from fp8calib.errors import refusal
from fp8calib.numerics.formats import E4M3FN, KV_FORMATS, NVFP4_CACHE, Fp8Format

if TYPE_CHECKING:
    from fp8calib.checkpoint.tensor_file import TensorFile
    from fp8calib.formats.table import ScaleTable
    from fp8calib.model.geometry import ModelGeometry

_KV_DTYPES: Mapping[str, Fp8Format] = {
    **{fmt.dtype_name: fmt for fmt in KV_FORMATS.values()},
    NVFP4_CACHE: E4M3FN,
}
"""For what scales are stored: the format with whose largest value they are computed."""
JSON_ORIGIN_KEY = "_fp8calib"
"""Holds the calibrated model and text."""
DTYPE_KEY = "fp8calib.kv_cache_dtype"
_ORIGIN_KEY = "fp8calib.measured_on"
_PROVENANCE_KEY = "fp8calib.provenance"
_FITS_KEY = "fp8calib.fits"
"""Holds what binds the scales to models: attention, and hashes of norms and embeddings."""
_ATTACHMENT_KEY = "fp8calib.grafted"
"""Holds the quantized checkpoint that the scales were added to."""
_BIAS = (
    "k and v of a quantized model carry the errors of its weights and activations, and so do "
    "their scales"
)


def make_metadata(
    *,
    fmt: Fp8Format | None = None,
    origin: CalibrationOrigin | None,
    geometry: ModelGeometry | None = None,
    per_head: bool = False,
) -> dict[str, str]:
    """Make the metadata of a file of scales; what is None is left out.

    Only scales of a known model record their granularity and the shapes of its attention.
    """
    metadata = {} if fmt is None else {DTYPE_KEY: fmt.dtype_name}
    if origin is not None:
        metadata[_ORIGIN_KEY] = json.dumps(origin.to_fields())
    if origin is not None and geometry is not None:
        fit: dict[str, object] = {
            "version": __version__,
            "granularity": "attn_head" if per_head else "tensor",
            "attention": describe_attention(geometry),
            "unquantized": dict(origin.unquantized),
        }
        if origin.measured_quantized:
            fit["measured_quantized"] = origin.measured_quantized
        metadata[_FITS_KEY] = json.dumps(fit, separators=(",", ":"))
    return metadata


def describe_source(table: ScaleTable) -> str:
    """Describe the quantized model that scales were read from; empty if they were calibrated."""
    if not table.dialect or (table.origin is not None and table.origin.data):
        return ""
    files = ", ".join(map(str, table.files))
    return f"scales of a quantized model ({table.dialect}: {files}): {_BIAS}"


def describe_table(
    table: ScaleTable, fmt: Fp8Format | None, attachment: Mapping[str, object]
) -> dict[str, str]:
    """Make the metadata of a table of scales for `fmt`, and the `Attachment` of a model."""
    metadata = make_metadata(
        fmt=fmt, origin=table.origin, geometry=table.geometry, per_head=table.per_head
    )
    if describe_source(table):
        fields = {
            "taken_from": "a quantized model",
            "dialect": table.dialect,
            "files": [*map(str, table.files)],
            "has_fp8_weights": table.has_weights,
            "bias": _BIAS,
        }
        metadata[_PROVENANCE_KEY] = json.dumps(fields)
    if attachment["model"]:  # otherwise the scales were calibrated on the checkpoint
        metadata[_ATTACHMENT_KEY] = json.dumps(attachment)
    return metadata


def describe_attention(geometry: ModelGeometry) -> dict[str, object]:
    """Describe a model's attention: its type, the number of layers, and each that has a cache.

    A layer is its index, kind, numbers of query and of KV heads, and sizes of a head of k and v.
    """
    return {
        "model_type": geometry.model_type,
        "num_layers": len(geometry.layers),
        "layers": [
            [layer.index, a.kind, a.num_heads, a.num_kv_heads, a.k_head_dim, a.v_head_dim]
            for layer, a in geometry.attentions()
        ],
    }


def explain_other_attention(recorded: Mapping[str, object], geometry: ModelGeometry) -> str:
    """Explain the first difference between a recorded attention and a model's; empty if none."""
    own = describe_attention(geometry)
    for key, what in (("model_type", "its model_type is"), ("num_layers", "its layers are")):
        if recorded.get(key) != own[key]:
            return f"{what} {own[key]}, not {recorded.get(key)!a:.60}"
    theirs, layers = recorded.get("layers"), own["layers"]
    if theirs == layers or not isinstance(theirs, list) or not isinstance(layers, list):
        return "" if theirs == layers else "the record of its attention is damaged"
    names = ("layer", "kind", "query heads", "KV heads", "size of a k head", "size of a v head")
    for other, mine in zip(theirs, layers, strict=False):
        fields = other if isinstance(other, list) else []
        for name, there, here in zip(names, fields, mine, strict=False):
            if there != here:
                return f"layer {mine[0]}: {name} is {here}, not {there!a:.40}"
    return f"{len(layers)} layers have a KV cache, not {len(theirs)}"


def find_format(path: Path, key: str, dtype: object) -> Fp8Format:
    """Find the format by the name of its torch dtype."""
    if not isinstance(dtype, str) or dtype not in _KV_DTYPES:
        known = " or ".join(_KV_DTYPES)
        raise refusal(path, f"{key} is {dtype!a:.60}", hint=f"KV scales are for {known}")
    return _KV_DTYPES[dtype]


def find_origin(place: Path, files: Iterable[TensorFile]) -> CalibrationOrigin | None:
    """Find the calibrated model and text recorded in any of the files.

    Raises:
        ModelError: the record is damaged, or the files record several models.
    """
    recorded = (_read_origin(file.path, file.metadata) for file in dict.fromkeys(files))
    named = [found for found in recorded if found is not None]
    if len({found.model for found in named}) > 1:
        raise refusal(
            place, "its files hold scales of several models", hint="keep the scales of one model"
        )
    return named[0] if named else None


def read_file_origin(path: Path) -> CalibrationOrigin | None:
    """Read the calibrated model that a JSON file or a file of tensors records; None without one.

    A JSON file that cannot be read records none.

    Raises:
        ModelError: the record is damaged, or a file of tensors cannot be read.
    """
    if path.suffix == ".safetensors":
        return _read_origin(path, read_header(path)[1])
    try:
        document = load_json(path) if path.suffix == ".json" else None
    except (OSError, ValueError, RecursionError):
        return None
    return parse_origin(path, document) if isinstance(document, dict) else None


def parse_origin(path: Path, document: Mapping[str, object]) -> CalibrationOrigin | None:
    """Parse the record of the calibrated model and text in a JSON document; None without one."""
    if JSON_ORIGIN_KEY not in document:
        return None
    return _parse_fields(path, JSON_ORIGIN_KEY, document[JSON_ORIGIN_KEY])


def _read_origin(path: Path, metadata: Mapping[str, str]) -> CalibrationOrigin | None:
    """Read the model and text in a header, with what binds the scales to models."""
    if _ORIGIN_KEY not in metadata:
        return None
    try:
        fields = json.loads(metadata[_ORIGIN_KEY])
    except (ValueError, RecursionError):
        fields = None
    origin = _parse_fields(path, _ORIGIN_KEY, fields)
    if _FITS_KEY not in metadata:
        return origin
    try:
        fields = json.loads(metadata[_FITS_KEY])
        attention, hashes = dict(fields["attention"]), dict(fields["unquantized"])
        measured = str(fields.get("measured_quantized", ""))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        hint = "it binds the scales to their model; write the file again"
        raise refusal(path, f"{_FITS_KEY} is damaged", hint=hint) from error
    unquantized = {str(name): str(digest) for name, digest in hashes.items()}
    return replace(
        origin, unquantized=unquantized, attention=attention, measured_quantized=measured
    )


def _parse_fields(path: Path, key: str, fields: object) -> CalibrationOrigin:
    try:
        return CalibrationOrigin.from_fields(fields)
    except ValueError as error:
        hint = "it names the model of the scales; write the file again"
        raise refusal(path, f"{key} is damaged: {error}", hint=hint) from error
