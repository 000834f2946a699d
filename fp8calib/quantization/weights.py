"""Read weights in chunks of rows that fit in a core's cache, and compute their scales."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES
from fp8calib.checkpoint.tensor_file import nonfinite_tensor_error
from fp8calib.model.module_paths import span_experts
from fp8calib.numerics.amax import amax_over, block_amax, tensor_amax
from fp8calib.numerics.encode import power_of_two_scale_of, scale_of
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE
from fp8calib.numerics.schemes import Granularity, Scheme
from fp8calib.quantization.matrices import AllZeroWeight, Matrix

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
        """Read consecutive rows of a weight, also of one in a stack, onto the device."""
        if not matrix.stack:
            values = self.checkpoint.read_rows(matrix.tensor, rows.start, rows.stop)
            return values.to(self._device)
        outputs = range(matrix.first + rows.start, matrix.first + rows.stop)
        inputs = range(matrix.shape[1])
        if matrix.is_transposed:
            values = self.checkpoint.read_block(matrix.stack, matrix.expert, inputs, outputs)
            return values.T.contiguous().to(self._device)
        values = self.checkpoint.read_block(matrix.stack, matrix.expert, outputs, inputs)
        return values.to(self._device)

    def measure(self, matrices: Sequence[Matrix]) -> list[float]:
        """Give the amax of whole weights; each is read only once."""
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


def split(length: int, step: int) -> list[range]:
    """Cut a length into pieces of at most `step`."""
    return [range(start, min(start + step, length)) for start in range(0, length, step)]


def split_rows(matrix: Matrix, block_rows: int = 1) -> list[range]:
    """Cut the rows of a weight into chunks of at most `CHUNK_BYTES`, at multiples of `block_rows`.

    A chunk has `block_rows` at least. Chunks of a weight stored [in, out] are larger: one of its
    inputs is read at a time.
    """
    rows, columns = matrix.shape
    step = CHUNK_BYTES // (columns * ITEM_SIZE_BYTES[matrix.dtype])
    if matrix.is_transposed:
        step = max(step, _TRANSPOSED_ROWS)
    return split(rows, max(1, step // block_rows) * block_rows)


def require_finite(amax: torch.Tensor, matrix: Matrix, rows: range, values: torch.Tensor) -> None:
    """Refuse rows of a weight that hold NaN or infinity, as `amax`, which covers them, shows."""
    if bool(amax.isfinite().all()):
        return
    row, column = (~values.isfinite()).nonzero()[0].tolist()
    index = [matrix.first + rows.start + row, column]
    if matrix.stack:  # the index in the tensor that it is read from
        index = [matrix.expert, *(reversed(index) if matrix.is_transposed else index)]
    raise nonfinite_tensor_error(matrix.source, float(values[row, column]), index)


class WeightScales:
    """Computes scales from magnitudes.

    A row or block of zeros takes the largest scale of its weight. A weight of zeros takes the scale
    of its group; else the largest scale of the same projection in other experts; else the largest
    scale of its layer; else 1. In MXFP8, zeros have the smallest exponent, as ModelOpt writes them.
    """

    def __init__(self, quantized: Collection[Matrix], reader: WeightReader) -> None:
        self._quantized = quantized
        self._reader = reader

    @cached_property
    def _pools(self) -> Mapping[tuple[str, str], Sequence[Matrix]]:
        """The sets of weights that may give a scale; few models have weights of zeros."""
        pools: dict[tuple[str, str], list[Matrix]] = defaultdict(list)
        for matrix in self._quantized:
            for pool in _name_pools(matrix):
                pools[pool].append(matrix)
        return pools

    def of_group(self, matrix: Matrix, scheme: Scheme) -> tuple[torch.Tensor, AllZeroWeight | None]:
        """Compute the scale that a weight shares with its group: fp32 []."""
        scale = self._find_largest(_name_pools(matrix), scheme)
        return scale, _count_zeros(matrix, torch.tensor(self._reader.measure([matrix])))

    def of_parts(
        self, matrix: Matrix, scheme: Scheme, amax: torch.Tensor
    ) -> tuple[torch.Tensor, AllZeroWeight | None]:
        """Compute the scales of the rows or blocks of a weight: fp32, the shape of `amax`."""
        all_zero = _count_zeros(matrix, amax)
        scales = scale_parts(amax, scheme)
        if all_zero is None or scheme.is_mx:
            return scales, all_zero
        if all_zero.count < all_zero.total:
            substitute = scales[amax > 0].max()
        else:
            substitute = self._find_largest(_name_pools(matrix)[1:], scheme)
        return torch.where(amax > 0, scales, substitute), all_zero

    def of_weight(self, matrix: Matrix, scheme: Scheme, values: torch.Tensor) -> torch.Tensor:
        """Compute the scales of a whole weight: fp32 [], or one per row or block, on its device."""
        if scheme.weights is Granularity.TENSOR:
            return self.of_group(matrix, scheme)[0].to(values.device)
        amax = part_amax(values, scheme).cpu()
        return self.of_parts(matrix, scheme, amax)[0].to(values.device)

    def _find_largest(self, pools: Iterable[tuple[str, str]], scheme: Scheme) -> torch.Tensor:
        """Find the largest scale of the first pool that is not all zeros; 1 if there is none."""
        for pool in pools:
            largest = max(self._reader.measure(self._pools[pool]))
            if largest > 0:
                return scale_parts(torch.tensor(largest), scheme)
        return torch.tensor(1.0)


def _name_pools(matrix: Matrix) -> tuple[tuple[str, str], ...]:
    """Name the sets of weights that a weight of zeros takes its scale from, the nearest first."""
    return (
        ("group", matrix.fused_group),
        ("projection of all experts", span_experts(matrix.module)),
        ("layer", matrix.layer),
    )


def scale_parts(amax: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Compute the scales of rows or blocks from their largest magnitudes: fp32, the same shape."""
    if not scheme.has_power_of_two_scales:
        return scale_of(amax, E4M3FN)
    smallest = SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE
    return power_of_two_scale_of(amax, E4M3FN, smallest=smallest)


def spread_scales(scales: torch.Tensor, shape: tuple[int, ...], scheme: Scheme) -> torch.Tensor:
    """Repeat the scales of a weight [R, C] so that they multiply codes: fp32 [R or 1, C or 1]."""
    if scheme.weights is not Granularity.BLOCK:
        return scales.reshape(-1, 1)
    rows, columns = scheme.block
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
    return spread[: shape[0], : shape[1]]


def part_amax(values: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Compute the largest magnitude of each row or block of a weight, as the scheme divides it."""
    if scheme.weights is Granularity.BLOCK:
        return block_amax(values, scheme.block)
    return amax_over(values, -1)


def _count_zeros(matrix: Matrix, amax: torch.Tensor) -> AllZeroWeight | None:
    count = int((amax == 0).sum())
    return AllZeroWeight(tensor=matrix.tensor, count=count, total=amax.numel()) if count else None
