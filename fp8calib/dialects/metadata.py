"""What fp8calib records in a file of scales: FP8 format, calibrated model and text, provenance.

Safetensors files hold it in the header's metadata, JSON files under a key at the top level. Engines
ignore both.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.dialects.refusals import refusal
from fp8calib.fp8.formats import KV_FORMATS, Fp8Format
from fp8calib.stats.calibration_origin import CalibrationOrigin

KV_DTYPES: Mapping[str, Fp8Format] = {fmt.dtype_name: fmt for fmt in KV_FORMATS.values()}
JSON_ORIGIN_KEY = "_fp8calib"
"""Holds the calibrated model and text."""
DTYPE_KEY = "fp8calib.kv_cache_dtype"
ORIGIN_KEY = "fp8calib.measured_on"
PROVENANCE_KEY = "fp8calib.provenance"
_BIAS = (
    "k and v of a quantized model carry the errors of its weights and activations, and so do "
    "their scales"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """The quantized model that scales were read from."""

    dialect: str
    files: tuple[str, ...]
    """The files that held them: only the names of folder and file."""
    has_fp8_weights: bool
    """The files hold FP8 weights too."""

    def describe(self) -> str:
        """Describe it in a sentence."""
        files = ", ".join(self.files)
        return f"scales of a quantized model ({self.dialect}: {files}): {_BIAS}"

    def to_json(self) -> str:
        """Describe it as JSON."""
        fields = {"taken_from": "a quantized model", **asdict(self), "bias": _BIAS}
        return json.dumps(fields)


def make_metadata(
    *, fmt: Fp8Format | None, origin: CalibrationOrigin | None, provenance: Provenance | None
) -> dict[str, str]:
    """Make the metadata of a file of scales, without what is None."""
    metadata = {} if fmt is None else {DTYPE_KEY: fmt.dtype_name}
    if origin is not None:
        metadata[ORIGIN_KEY] = json.dumps(origin.to_fields())
    if provenance is not None:
        metadata[PROVENANCE_KEY] = provenance.to_json()
    return metadata


def find_recorded_format(file: TensorFile) -> Fp8Format | None:
    """Find the FP8 format recorded in a file; None if there is none.

    Raises:
        ModelError: it is not a format of KV scales.
    """
    dtype = file.header.metadata.get(DTYPE_KEY)
    return None if dtype is None else find_format(file.path, DTYPE_KEY, dtype)


def find_origin(place: Path, files: Iterable[TensorFile]) -> CalibrationOrigin | None:
    """Find the calibrated model and text recorded in any of the files.

    Raises:
        ModelError: the record is damaged, or the files record several models.
    """
    recorded = map(_find_recorded_origin, dict.fromkeys(files))
    named = [found for found in recorded if found is not None]
    if len({found.model for found in named}) > 1:
        raise refusal(
            place, "its files hold scales of several models", hint="keep the scales of one model"
        )
    return named[0] if named else None


def _find_recorded_origin(file: TensorFile) -> CalibrationOrigin | None:
    text = file.header.metadata.get(ORIGIN_KEY)
    if text is None:
        return None
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        fields = None
    return parse_origin(file.path, ORIGIN_KEY, fields)


def find_format(path: Path, key: str, dtype: object) -> Fp8Format:
    """Find the format by the name of its torch dtype."""
    if not isinstance(dtype, str) or dtype not in KV_DTYPES:
        known = " or ".join(KV_DTYPES)
        raise refusal(path, f"{key} is {dtype!a:.60}", hint=f"KV scales are for {known}")
    return KV_DTYPES[dtype]


def parse_origin(path: Path, key: str, fields: object) -> CalibrationOrigin:
    """Parse the record of the calibrated model and text."""
    try:
        return CalibrationOrigin.from_fields(fields)
    except ValueError as error:
        hint = "it names the model of the scales; write the file again"
        raise refusal(path, f"{key} is damaged: {error}", hint=hint) from error
