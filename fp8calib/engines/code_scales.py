"""Find scales that make NaN or zeros of integer and FP4 weights (FP8: `weight_replay.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.weights.stored import describe_bad
from fp8calib.errors import shorten
from fp8calib.numerics.formats import SMALLEST_SCALE

_MARKS = {"I8": 0xFF, "I32": 0xFF, "U8": 0x77}
"""The dtypes of codes, and the bits that count: FP4 has zeros of both signs."""
_NAN_EXPONENT = 255
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale")


def list_scale_faults(folder: ScaleFolder) -> Iterator[str]:
    """Describe scales of NaN exponents, and those too small for codes that are not zero.

    NaN and infinity of floats are not looked for.

    Raises:
        ModelError: a file cannot be read.
    """
    located = {name: file for file, held in folder.tensors.items() for name in held}
    for file, held in folder.tensors.items():
        with TensorFile(folder.path / file) as opened:
            for name, entry in held.items():
                codes = next(filter(located.__contains__, _name_codes(name)), None)
                if codes is None or not entry.size_bytes:
                    continue
                if fault := _describe_fault(folder, opened, name, located[codes], codes):
                    yield fault


def _name_codes(scale: str) -> tuple[str, ...]:
    """Name the tensors of codes that a scale may belong to."""
    module = scale.rpartition(".")[0]
    if scale.endswith(_SCALES):
        return f"{module}.weight_packed", f"{module}.weight"
    return (f"{scale.removesuffix('_scales')}_blocks",) if scale.endswith("_scales") else ()


def _describe_fault(
    folder: ScaleFolder, opened: TensorFile, name: str, file: str, codes: str
) -> str:
    """Say what is wrong with a scale; empty where nothing is."""
    entry, weight = opened.tensors[name], folder.tensors[file][codes]
    if entry.dtype == "U8":
        is_wrong = opened.read_array(name, 0, entry.size_bytes) == _NAN_EXPONENT
        return _describe(name, entry, is_wrong, "NaN (an exponent of 255)")
    if weight.dtype not in _MARKS or entry.dtype in PACKED_BITS or not weight.size_bytes:
        return ""
    values = opened.read_scale(name)
    # Scales of some tools are negative: their integers then reach -8 on the other side.
    is_wrong = np.abs(values.ravel()) < SMALLEST_SCALE
    if not is_wrong.any() or weight.size_bytes % values.size:
        return ""
    # Tools write zeros beside groups of zeros, or of values that all underflow.
    with TensorFile(folder.path / file) as beside:
        data = beside.read_array(codes, 0, weight.size_bytes).reshape(values.size, -1)
    data &= _MARKS[weight.dtype]
    is_wrong &= (data != data[:, :1]).any(axis=1)
    what = describe_bad(np.abs(values.ravel()[is_wrong]), SMALLEST_SCALE)
    return _describe(name, entry, is_wrong, f"{what} beside codes that are not zero")


def _describe(name: str, entry: TensorEntry, is_wrong: NDArray[np.bool_], what: str) -> str:
    """Say where the first of the wrong scales is, and how many they are."""
    if not is_wrong.any():
        return ""
    place = [int(each) for each in np.unravel_index(is_wrong.argmax(), entry.shape or (1,))]
    counted = f"{is_wrong.sum():,} of its {is_wrong.size:,} scales"
    return f"{shorten(name)} holds {what} at {place}: {counted}"
