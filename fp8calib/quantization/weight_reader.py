"""Weights read in blocks of rows by several threads: a block stays in a core's cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ModelError
from fp8calib.fp8.encode import BLOCK, block_amax, row_amax, tensor_amax
from fp8calib.fp8.schemes import Dynamic
from fp8calib.quantization.selection.select import Matrix

BLOCK_BYTES = 1 << 20
"""Of a weight, read at once."""
_PIECE_ROWS = 16 * BLOCK
"""Of a weight that lies [in, out], read at once: 4 KiB of bfloat16 for each input."""
_BYTES = {"BF16": 2, "F16": 2, "F32": 4}
_REDUCTIONS: Mapping[Dynamic, Callable[[torch.Tensor], torch.Tensor]] = {
    Dynamic.TENSOR: tensor_amax,
    Dynamic.TOKEN: row_amax,
    Dynamic.BLOCK: block_amax,
}


class WeightReader:
    """Reads weights of a checkpoint, and knows the amax of those it has measured.

    Args:
        checkpoint: where the weights are.
        pool: whose threads read.
        device: where blocks are computed on.
    """

    def __init__(
        self, checkpoint: Checkpoint, pool: ThreadPoolExecutor, *, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.pool = pool
        self._device = device
        self._amax: dict[str, float] = {}

    def read(self, matrix: Matrix, rows: range) -> torch.Tensor:
        """Read consecutive rows onto the device."""
        return _read_rows(self.checkpoint, matrix, rows).to(self._device)

    def measure(self, matrices: Sequence[Matrix]) -> list[float]:
        """Give the amax of whole weights; each is read once, however often it is asked for.

        Raises:
            ModelError: a weight holds NaN or infinity; the message names tensor and index.
        """
        unknown = [matrix for matrix in matrices if matrix.module not in self._amax]
        started: list[list[Future[float]]] = [
            [self.pool.submit(self._measure_rows, matrix, rows) for rows in split_rows(matrix)]
            for matrix in unknown
        ]
        for matrix, parts in zip(unknown, started, strict=True):
            self._amax[matrix.module] = max(part.result() for part in parts)
        return [self._amax[matrix.module] for matrix in matrices]

    def _measure_rows(self, matrix: Matrix, rows: range) -> float:
        return float(reduce_rows(matrix, rows, self.read(matrix, rows), Dynamic.TENSOR))


def _read_rows(checkpoint: Checkpoint, matrix: Matrix, rows: range) -> torch.Tensor:
    place = matrix.place
    if place is None:
        return checkpoint.read_rows(matrix.tensor, rows.start, rows.stop)
    outputs = range(place.first + rows.start, place.first + rows.stop)
    inputs = range(matrix.shape[1])
    if place.is_transposed:
        return checkpoint.read_block(place.tensor, place.expert, inputs, outputs).T.contiguous()
    return checkpoint.read_block(place.tensor, place.expert, outputs, inputs)


def split_rows(matrix: Matrix) -> list[range]:
    """Cut the rows of a weight into blocks of about `BLOCK_BYTES`, at multiples of 128 rows.

    Of a weight that lies [in, out] they are larger: one of its inputs is read at a time.
    """
    rows, columns = matrix.shape
    row_bytes = columns * _BYTES[matrix.dtype]
    step = max(1, BLOCK_BYTES // row_bytes // BLOCK) * BLOCK
    if matrix.place is not None and matrix.place.is_transposed:
        step = max(step, _PIECE_ROWS)
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def reduce_rows(matrix: Matrix, rows: range, values: torch.Tensor, covers: Dynamic) -> torch.Tensor:
    """Find the amax of what shares a scale within `rows` of a weight: fp32, see `cast`.

    Raises:
        ModelError: there is NaN or infinity; the message names tensor and index.
    """
    amax = _REDUCTIONS[covers](values)
    if not bool(amax.isfinite().all()):
        row, column = (~values.isfinite()).nonzero()[0].tolist()
        index = _find_index(matrix, rows.start + row, column)
        raise ModelError(
            f"{matrix.source} holds {float(values[row, column])} at {index}",
            hint="the checkpoint is damaged, or overflowed in training or conversion",
        )
    return amax


def _find_index(matrix: Matrix, row: int, column: int) -> list[int]:
    """Tell where an element of a weight lies in the tensor it is read from."""
    place = matrix.place
    if place is None:
        return [row, column]
    inner = [place.first + row, column]
    return [place.expert, *(reversed(inner) if place.is_transposed else inner)]
