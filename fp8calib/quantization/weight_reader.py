"""Read weights in chunks of rows by several threads: a chunk fits in a core's cache."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES
from fp8calib.checkpoint.tensor_file import nonfinite_tensor_error
from fp8calib.numerics.amax import tensor_amax
from fp8calib.quantization.matrices import Matrix

CHUNK_BYTES = 1 << 20
"""How much of a weight is read at once."""
_TRANSPOSED_ROWS = 2048
"""The rows that are read at once of a weight stored [in, out]: 4 KiB of bfloat16 per input."""


class WeightReader:
    """Reads weights of a checkpoint by the threads of `pool`; remembers the amax of some."""

    def __init__(
        self, checkpoint: Checkpoint, pool: ThreadPoolExecutor, *, device: torch.device
    ) -> None:
        self.checkpoint = checkpoint
        self.pool = pool
        self._device = device
        self._amax: dict[str, float] = {}

    def read(self, matrix: Matrix, rows: range) -> torch.Tensor:
        """Read consecutive rows onto the device."""
        return read_matrix(self.checkpoint, matrix, rows).to(self._device)

    def measure(self, matrices: Sequence[Matrix]) -> list[float]:
        """Give the amax of whole weights; each is read only once.

        Raises:
            ModelError: a weight holds NaN or infinity; the message names the tensor and the index.
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
        values = self.read(matrix, rows)
        amax = tensor_amax(values)
        require_finite(amax, matrix, rows, values)
        return float(amax)


def read_matrix(checkpoint: Checkpoint, matrix: Matrix, rows: range) -> torch.Tensor:
    """Read consecutive rows of a weight, also of one in a stack."""
    position = matrix.position
    if position is None:
        return checkpoint.read_rows(matrix.tensor, rows.start, rows.stop)
    outputs = range(position.first + rows.start, position.first + rows.stop)
    inputs = range(matrix.shape[1])
    if position.is_transposed:
        return checkpoint.read_block(
            position.tensor, position.expert, inputs, outputs
        ).T.contiguous()
    return checkpoint.read_block(position.tensor, position.expert, outputs, inputs)


def split_rows(matrix: Matrix, block_rows: int = 1) -> list[range]:
    """Cut the rows of a weight into chunks of at most `CHUNK_BYTES`, at multiples of `block_rows`.

    A chunk has `block_rows` at least. Chunks of a weight stored [in, out] are larger: one of its
    inputs is read at a time.
    """
    rows, columns = matrix.shape
    step = CHUNK_BYTES // (columns * ITEM_SIZE_BYTES[matrix.dtype])
    if matrix.position is not None and matrix.position.is_transposed:
        step = max(step, _TRANSPOSED_ROWS)
    step = max(1, step // block_rows) * block_rows
    return [range(start, min(start + step, rows)) for start in range(0, rows, step)]


def require_finite(amax: torch.Tensor, matrix: Matrix, rows: range, values: torch.Tensor) -> None:
    """Refuse rows of a weight that hold NaN or infinity, as `amax`, which covers them, shows.

    Raises:
        ModelError: naming the tensor and the index.
    """
    if bool(amax.isfinite().all()):
        return
    row, column = (~values.isfinite()).nonzero()[0].tolist()
    index, position = [rows.start + row, column], matrix.position
    if position is not None:  # the index in the tensor that it is read from
        index[0] += position.first
        index = [position.expert, *(reversed(index) if position.is_transposed else index)]
    raise nonfinite_tensor_error(matrix.source, float(values[row, column]), index)
