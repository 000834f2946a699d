"""Read every tensor of a checkpoint for values that no engine computes with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fp8calib.calibration.progress import Progress
from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry
from fp8calib.checkpoint.tensor_file import TensorFile
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.odd_scales import suspect_sizes
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import LoadVerdict, Reports
from fp8calib.engines.status import Status
from fp8calib.engines.weight_estimates import measure_sizes
from fp8calib.engines.weights.stored import NOT_FINITE_FIX, describe_bad
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import is_linear_scale
from fp8calib.numerics.formats import SMALLEST_SCALE

_AT_ONCE_BYTES = 2**26
_SHOWN = 3
_MAGNITUDE = 0x7F
"""All bits of an e4m3fn code but the sign."""
_CODE_448, _CODE_416 = 0x7E, 0x7D
_MAX_SHARE, _MAX_RATIO = 0.05, 2
"""A matrix counts as clipped if the share of codes of 448 exceeds the first number, and their ratio
to codes of 416 the second.

With scales from amax the share is at most 2 %, and the ratio 1.9 (SmolLM2-135M, 2,385 matrices of
other tools); with scales half as large for each row they are 6 % and 4.
"""


def amend_for_values(reports: Reports, folder: ScaleFolder, progress: Progress) -> Reports:
    """Add to reports what the values of all tensors show: every engine computes with them.

    Tensors are read some megabytes at a time.

    Raises:
        ModelError: a file cannot be read.
    """
    faults: list[str] = []  # NaN, infinity; scales that turn weights into NaN or zeros
    suspicious: list[str] = []  # FP8 with too much of its largest code, or unlike other layers
    empty: list[str] = []
    notes: list[str] = []  # rows of zeros, as embeddings of unused tokens have
    total = sum(entry.size_bytes for held in folder.tensors.values() for entry in held.values())
    progress.stage("reading values", total, unit="bytes")
    for file in folder.tensors:
        with TensorFile(folder.path / file) as opened:
            for name, entry in opened.tensors.items():
                dtype = TORCH_DTYPES.get(entry.dtype)
                if dtype is None or not dtype.is_floating_point or not entry.size_bytes:
                    progress.advance(entry.size_bytes)
                    continue
                fault, zero_rows, share = _examine(opened, name, entry, progress)
                if fault:
                    faults.append(fault)
                if share > _MAX_SHARE:
                    why = "it was quantized with a scale that is too small"
                    suspicious.append(f"{share:.0%} of {shorten(name)} has the largest code: {why}")
                if is_linear_scale(name):
                    continue  # `_list_scale_faults` judges its zeros beside the codes
                if zero_rows and zero_rows == math.prod(entry.shape[:-1]):
                    empty.append(f"{shorten(name)}: all of it is zeros")
                elif zero_rows:
                    notes.append(f"{shorten(name)}: {zero_rows:,} of its rows are zeros")
    faults += _list_scale_faults(folder)
    suspicious += suspect_sizes(measure_sizes(folder))
    wrong, odd, zeros = map(_join, (faults, suspicious, [*empty, *notes]))
    amended = {}
    for key, each in reports.items():
        is_told = each.weights is not None  # of another fault
        report = each.add(problems=[*zeros, *(wrong if is_told else ())], suspicious=odd)
        if wrong and not is_told:
            verdict = LoadVerdict(status=Status.BAD, why=wrong[0], fix=NOT_FINITE_FIX)
            report = report.model_copy(update={"weights": verdict})
        amended[key] = report
    return amended


def _join(texts: Sequence[str]) -> list[str]:
    """Join texts into one, or none."""
    more = [f"{len(texts) - _SHOWN} more such tensors"] if len(texts) > _SHOWN else []
    return ["; ".join([*texts[:_SHOWN], *more])] if texts else []


def _examine(
    file: TensorFile, name: str, entry: TensorEntry, progress: Progress
) -> tuple[str, int, float]:
    """Describe the NaN and infinities of a tensor, and count the rows of zeros of a matrix.

    The last number is the share of codes of 448 in a matrix of e4m3fn; 0 if the code of 416 is
    nearly as frequent (nothing is clipped) or absent (the matrix is ternary).
    """
    dtype = TORCH_DTYPES[entry.dtype]
    itemsize = dtype.itemsize
    row_bytes = entry.shape[-1] * itemsize if entry.shape else itemsize
    step = max(1, _AT_ONCE_BYTES // row_bytes) * row_bytes
    num_wrong, first_wrong = 0, -1
    num_zero_rows, num_448, num_416 = 0, 0, 0
    is_matrix = len(entry.shape) > 1
    # Rows are compared with zero in words of several values; -0.0 counts as zero.
    word = np.dtype("u8" if row_bytes % 8 == 0 else f"u{itemsize}")
    signs = torch.full((8 // itemsize,), -0.0).to(dtype).view(torch.uint8).numpy().view(word)[0]
    for start in range(0, entry.size_bytes, step):
        data = file.read_bytes(name, start, min(start + step, entry.size_bytes)).numpy()
        wrong = np.flatnonzero(_mark_not_finite(data, dtype))
        if len(wrong) and not num_wrong:
            first_wrong = start // itemsize + int(wrong[0])
        num_wrong += len(wrong)
        if is_matrix and dtype is torch.float8_e4m3fn:
            magnitudes = data & _MAGNITUDE
            num_448 += int(np.count_nonzero(magnitudes == _CODE_448))
            num_416 += int(np.count_nonzero(magnitudes == _CODE_416))
        if is_matrix:
            words = data.view(word).reshape(len(data) // row_bytes, -1)
            rows = np.bitwise_or.reduce(words, axis=1)
            num_zero_rows += int(np.count_nonzero((rows & ~signs) == 0))
        progress.advance(len(data))
    is_clipped = 0 < _MAX_RATIO * num_416 < num_448
    share = num_448 / entry.size_bytes if is_clipped else 0.0
    if not num_wrong:
        return "", num_zero_rows, share
    code = file.read_bytes(name, first_wrong * itemsize, (first_wrong + 1) * itemsize)
    what = "NaN" if code.view(dtype).float().isnan() else "infinity"
    counted = f"{num_wrong:,} of its {entry.size_bytes // itemsize:,} values are not finite"
    return _describe(name, entry, first_wrong, what, counted), num_zero_rows, share


def _describe(name: str, entry: TensorEntry, first: int, what: str, counted: str) -> str:
    """Say what a tensor holds, where the first is, and how many there are."""
    place = [int(each) for each in np.unravel_index(first, entry.shape or (1,))]
    return f"{shorten(name)} holds {what} at {place}: {counted}"


def _mark_not_finite(data: NDArray[np.uint8], dtype: torch.dtype) -> NDArray[np.bool_]:
    """Mark the values that are NaN or infinity, by their bits: faster than torch's `isfinite`."""
    if dtype.itemsize == 1:
        values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
        codes = np.flatnonzero(~values.isfinite()).astype(np.uint8)
        return np.asarray(np.logical_or.reduce([data == code for code in codes]))
    kind = np.dtype(f"u{dtype.itemsize}")
    exponent = torch.tensor([torch.inf], dtype=dtype).view(torch.uint8).numpy().view(kind)
    return np.asarray((data.view(kind) & exponent) == exponent)


# --- scales that make NaN or zeros of integer and FP4 weights -------------------------------------

_CODE_BITS = {"I8": 0xFF, "I32": 0xFF, "U8": 0x77}
"""By dtype, the bits of a byte by which codes are compared; FP4 without signs: it has two zeros."""
_NAN_EXPONENT = 255
_SCALES = (".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale")


def _list_scale_faults(folder: ScaleFolder) -> Iterator[str]:
    """Describe E8M0 scales that are NaN, and scales so small that they turn codes into zeros.

    `_examine` finds NaN and infinity in scales that are floats.
    """
    located = {name: file for file, held in folder.tensors.items() for name in held}
    for file, held in folder.tensors.items():
        with TensorFile(folder.path / file) as opened:
            for name, entry in held.items():
                names: tuple[str, ...] = ()
                if name.endswith(_SCALES):
                    module = name.rpartition(".")[0]
                    names = (f"{module}.weight_packed", f"{module}.weight")
                elif name.endswith("_scales"):
                    names = (f"{name.removesuffix('_scales')}_blocks",)
                codes = next(filter(located.__contains__, names), None)
                if codes is None or not entry.size_bytes:
                    continue
                is_wrong, what = _judge_scale(folder, opened, name, located[codes], codes)
                if is_wrong.any():
                    counted = f"{is_wrong.sum():,} of its {is_wrong.size:,} scales"
                    yield _describe(name, entry, int(is_wrong.argmax()), what, counted)


def _judge_scale(
    folder: ScaleFolder, opened: TensorFile, name: str, file: str, codes: str
) -> tuple[NDArray[np.bool_], str]:
    """Mark what is wrong in a scale, and say what that is."""
    entry, weight = opened.tensors[name], folder.tensors[file][codes]
    if entry.dtype == "U8":
        exponents = opened.read_array(name, 0, entry.size_bytes)
        return exponents == _NAN_EXPONENT, "NaN (an exponent of 255)"
    if weight.dtype not in _CODE_BITS or entry.dtype in PACKED_BITS or not weight.size_bytes:
        return np.zeros(1, np.bool_), ""
    # Some tools write negative scales, so that the code -8 becomes the largest positive weight.
    sizes = np.abs(opened.read_floats(name, of_scale=True).ravel())
    is_wrong = sizes < SMALLEST_SCALE
    if not is_wrong.any() or weight.size_bytes % sizes.size:
        return np.zeros(1, np.bool_), ""
    # A scale of zero is no fault if all codes of its group are equal: tools write it beside groups
    # of zeros, or of values that all underflow.
    with TensorFile(folder.path / file) as beside:
        data = beside.read_array(codes, 0, weight.size_bytes).reshape(sizes.size, -1)
    data &= _CODE_BITS[weight.dtype]
    is_wrong &= (data != data[:, :1]).any(axis=1)
    bad = describe_bad(sizes[is_wrong], SMALLEST_SCALE)
    return is_wrong, f"{bad} beside codes that are not zero"
