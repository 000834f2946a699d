"""Read every tensor of a checkpoint for values that no engine computes with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.odd_scales import suspect_sizes
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import EngineReport, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.engines.weight_estimates import measure_sizes
from fp8calib.engines.weights.stored import NOT_FINITE_FIX, describe_bad
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import is_linear_scale
from fp8calib.numerics.formats import SMALLEST_SCALE

_AT_ONCE_BYTES = 2**26
_SHOWN = 3
_MAGNITUDE, _LARGEST = 0x7F, (0x7E, 0x7D)
"""The bits without the sign, and the codes of 448 and 416 in e4m3fn."""
_MOST_LARGEST, _MOST_PEAK = 0.05, 2
"""A matrix counts as clipped if more than this share of its codes is 448, and if they are more than
this many times as frequent as codes of 416.

With scales from amax the share is at most 2 %, and the ratio 1.9 (SmolLM2-135M, 2,385 matrices of
other tools); with scales half as large for each row they are 6 % and 4.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightValues:
    """What the values of all tensors of a checkpoint show."""

    faults: tuple[str, ...]
    """Tensors that hold NaN or infinity, and scales that turn weights into NaN or zeros."""
    suspicious: tuple[str, ...]
    """FP8 matrices with too many of the largest code, or unlike those of other layers."""
    notes: tuple[str, ...]
    """Tensors of zeros, and those with rows of zeros, as embeddings of unused tokens have."""

    def amend(self, engine: EngineReport) -> EngineReport:
        """Add these findings to the report of an engine; every engine computes with the values."""
        if self.notes:
            engine = engine.add_problems(_join(self.notes))
        if self.suspicious:
            engine = engine.suspect(_join(self.suspicious))
        if not self.faults:
            return engine
        if engine.weights is not None:  # a fault of its own stands there
            return engine.add_problems(_join(self.faults))
        verdict = LoadVerdict(status=Status.BAD, why=_join(self.faults), fix=NOT_FINITE_FIX)
        return engine.model_copy(update={"weights": verdict})


def _join(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _SHOWN} more such tensors"] if len(texts) > _SHOWN else []
    return "; ".join([*texts[:_SHOWN], *more])


def read_weight_values(folder: ScaleFolder, progress: Progress) -> WeightValues:
    """Read all tensors that hold floats, some megabytes at a time.

    Raises:
        ModelError: a file cannot be read.
    """
    faults: list[str] = []
    suspicious: list[str] = []
    empty: list[str] = []
    notes: list[str] = []
    total = sum(entry.size_bytes for held in folder.tensors.values() for entry in held.values())
    progress.stage("reading values", total, unit="bytes")
    for file in folder.tensors:
        with TensorFile(folder.path / file) as opened:
            for name, entry in opened.tensors.items():
                dtype = TORCH_DTYPES.get(entry.dtype)
                if dtype is not None and dtype.is_floating_point and entry.size_bytes:
                    fault, zero_rows, share = _examine(opened, name, entry, progress)
                    if fault:
                        faults.append(fault)
                    if share > _MOST_LARGEST:
                        why = "it was quantized with a scale that is too small"
                        suspicious.append(
                            f"{share:.0%} of {shorten(name)} has the largest code: {why}"
                        )
                    if is_linear_scale(name):
                        continue  # its zeros are judged beside the codes
                    if zero_rows and zero_rows == math.prod(entry.shape[:-1]):
                        empty.append(f"{shorten(name)}: all of it is zeros")
                    elif zero_rows:
                        notes.append(f"{shorten(name)}: {zero_rows:,} of its rows are zeros")
                else:
                    progress.advance(entry.size_bytes)
    faults += _list_scale_faults(folder)
    suspicious += suspect_sizes(measure_sizes(folder))
    return WeightValues(faults=tuple(faults), suspicious=tuple(suspicious), notes=(*empty, *notes))


def _examine(
    file: TensorFile, name: str, entry: TensorEntry, progress: Progress
) -> tuple[str, int, float]:
    """Describe the NaN and infinities of a tensor, and count the rows of zeros of a matrix.

    Returns:
        The fault (empty if all values are finite), the number of rows of zeros, and the share of
        the code of 448 in a matrix of e4m3fn. The share is 0 if the code of 416 is nearly as
        frequent (nothing is clipped) or absent (the matrix is ternary).
    """
    dtype = TORCH_DTYPES[entry.dtype]
    itemsize = dtype.itemsize
    row_bytes = entry.shape[-1] * itemsize if entry.shape else itemsize
    step = max(1, _AT_ONCE_BYTES // row_bytes) * row_bytes
    number, zero_rows, first = 0, 0, -1
    is_matrix = len(entry.shape) > 1
    tops = np.zeros(2, np.int64)
    word = np.dtype("u8" if row_bytes % 8 == 0 else f"u{itemsize}")
    minus = torch.full((8 // itemsize,), -0.0).to(dtype).view(torch.uint8).numpy().view(word)[0]
    for start in range(0, entry.size_bytes, step):
        data = file.read_bytes(name, start, min(start + step, entry.size_bytes)).numpy()
        found = np.flatnonzero(_find_wrong(data, dtype))
        if len(found) and not number:
            first = start // itemsize + int(found[0])
        number += len(found)
        if is_matrix and dtype is torch.float8_e4m3fn:
            tops += [np.count_nonzero((data & _MAGNITUDE) == code) for code in _LARGEST]
        if is_matrix:
            words = data.view(word).reshape(len(data) // row_bytes, -1)
            rows = np.bitwise_or.reduce(words, axis=1)
            zero_rows += int(np.count_nonzero((rows & ~minus) == 0))
        progress.advance(len(data))
    is_peak = 0 < _MOST_PEAK * tops[1] < tops[0]
    share = float(tops[0]) / entry.size_bytes if is_peak else 0.0
    if not number:
        return "", zero_rows, share
    code = file.read_bytes(name, first * itemsize, (first + 1) * itemsize)
    what = "NaN" if code.view(dtype).float().isnan() else "infinity"
    place = [int(each) for each in np.unravel_index(first, entry.shape or (1,))]
    counted = f"{number:,} of its {entry.size_bytes // itemsize:,} values are not finite"
    return f"{shorten(name)} holds {what} at {place}: {counted}", zero_rows, share


def _find_wrong(data: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.bool_]:
    """Mark the values that are NaN or infinity, by their bits: faster than torch's `isfinite`."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        codes = np.flatnonzero(~values.isfinite()).astype(np.uint8)
        return np.asarray(np.logical_or.reduce([data == code for code in codes]))
    kind = np.dtype(f"u{dtype.itemsize}")
    exponent = torch.tensor([torch.inf], dtype=dtype).view(torch.uint8).numpy().view(kind)
    return np.asarray((data.view(kind) & exponent) == exponent)


# --- scales that make NaN or zeros of integer and FP4 weights -------------------------------------

_MARKS = {"I8": 0xFF, "I32": 0xFF, "U8": 0x77}
"""The dtypes of codes, and the bits that count: FP4 has zeros of both signs."""
_NAN_EXPONENT = 255
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale")


def _list_scale_faults(folder: ScaleFolder) -> Iterator[str]:
    """Describe scales of NaN exponents, and those too small for codes that are not zero.

    NaN and infinity of floats are not looked for here.
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
    """Say what is wrong with a scale; empty if nothing is."""
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
    """Say where the first wrong scale is, and how many there are; empty if there is none."""
    if not is_wrong.any():
        return ""
    place = [int(each) for each in np.unravel_index(is_wrong.argmax(), entry.shape or (1,))]
    counted = f"{is_wrong.sum():,} of its {is_wrong.size:,} scales"
    return f"{shorten(name)} holds {what} at {place}: {counted}"
