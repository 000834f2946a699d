"""Read every tensor of a checkpoint for values that no engine computes with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, TensorFile
from fp8calib.engines.replay.folder import ScaleFolder
from fp8calib.engines.replay.verdicts import CheckReport, LoadVerdict
from fp8calib.engines.status import Status
from fp8calib.errors import shorten
from fp8calib.machine.progress import Progress

_AT_ONCE_BYTES = 2**26
_WRONG: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "F64": (np.uint64, 0x7FF << 52, 0x7FF << 52),
    "F32": (np.uint32, 0xFF << 23, 0xFF << 23),
    "F16": (np.uint16, 0x7C00, 0x7C00),
    "BF16": (np.uint16, 0x7F80, 0x7F80),
    "F8_E5M2": (np.uint8, 0x7C, 0x7C),
    "F8_E4M3": (np.uint8, 0x7F, 0x7F),
    "F8_E8M0": (np.uint8, 0xFF, 0xFF),
    "F8_E4M3FNUZ": (np.uint8, 0xFF, 0x80),
    "F8_E5M2FNUZ": (np.uint8, 0xFF, 0x80),
}
"""By dtype: its bits as numbers, a mask, and what masked bits of NaN and infinity are."""
_SHOWN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightValues:
    """What the values of all tensors of a checkpoint show."""

    faults: tuple[str, ...]
    """Tensors that hold NaN or infinity."""
    notes: tuple[str, ...]
    """Tensors with rows of zeros, which are right for tokens that nobody uses."""

    def amend(self, report: CheckReport) -> CheckReport:
        """Add it to the report of every engine: all of them compute with these values."""
        engines = dict(report.engines)
        for key, engine in engines.items():
            if self.faults and engine.weights is None:
                fix = "download the file again; if it is the same, quantize or train again"
                verdict = LoadVerdict(status=Status.BAD, why=_join(self.faults), fix=fix)
                engine = engine.model_copy(update={"weights": verdict})  # noqa: PLW2901
            engines[key] = engine.add_problems(_join(self.notes)) if self.notes else engine
        return report.model_copy(update={"engines": engines})


def _join(texts: Sequence[str]) -> str:
    more = [f"{len(texts) - _SHOWN} more such tensors"] if len(texts) > _SHOWN else []
    return "; ".join([*texts[:_SHOWN], *more])


def read_weight_values(folder: ScaleFolder, progress: Progress) -> WeightValues:
    """Read all tensors that hold floats, some megabytes at a time.

    Raises:
        ModelError: a file cannot be read.
    """
    faults: list[str] = []
    notes: list[str] = []
    total = sum(entry.size_bytes for held in folder.tensors.values() for entry in held.values())
    progress.stage("reading values", total, unit="bytes")
    for file in folder.tensors:
        with TensorFile(folder.path / file) as opened:
            for name, entry in opened.tensors.items():
                if entry.dtype in _WRONG and entry.size_bytes:
                    fault, zero_rows = _read(opened, name, entry, progress)
                    if fault:
                        faults.append(fault)
                    if zero_rows:
                        notes.append(f"{shorten(name)}: {zero_rows:,} of its rows are zeros")
                else:
                    progress.advance(entry.size_bytes)
    return WeightValues(faults=tuple(faults), notes=tuple(notes))


def _read(file: TensorFile, name: str, entry: TensorEntry, progress: Progress) -> tuple[str, int]:
    """Describe the NaN and infinities of a tensor, and count the rows of zeros of a matrix."""
    kind, mask, wrong = _WRONG[entry.dtype]
    itemsize = np.dtype(kind).itemsize
    row_bytes = entry.shape[-1] * itemsize if entry.shape else itemsize
    step = max(1, _AT_ONCE_BYTES // row_bytes) * row_bytes
    number, zero_rows, first = 0, 0, -1
    for start in range(0, entry.size_bytes, step):
        data = file.read_bytes(name, start, min(start + step, entry.size_bytes)).numpy()
        found = np.flatnonzero((data.view(kind) & kind(mask)) == kind(wrong))
        if len(found) and not number:
            first = start // itemsize + int(found[0])
        number += len(found)
        if len(entry.shape) > 1:
            words = data.view(np.uint64) if row_bytes % 8 == 0 else data
            rows = np.bitwise_or.reduce(words.reshape(len(data) // row_bytes, -1), axis=1)
            zero_rows += int(np.count_nonzero(rows == 0))
        progress.advance(len(data))
    if not number:
        return "", zero_rows
    code = file.read_bytes(name, first * itemsize, (first + 1) * itemsize)
    what = "NaN" if code.view(TORCH_DTYPES[entry.dtype]).float().isnan() else "infinity"
    place = [int(each) for each in np.unravel_index(first, entry.shape or (1,))]
    counted = f"{number:,} of its {entry.size_bytes // itemsize:,} values are not finite"
    return f"{shorten(name)} holds {what} at {place}: {counted}", zero_rows
