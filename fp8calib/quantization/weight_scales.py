"""Compute the scales of weights from their magnitudes, with substitutes for zero magnitudes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

import torch

from fp8calib.model.module_paths import span_experts
from fp8calib.numerics.amax import block_amax, row_amax
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE
from fp8calib.numerics.from_amax import power_of_two_scale_of, scale_of
from fp8calib.numerics.schemes import Granularity, Scheme
from fp8calib.quantization.all_zero import AllZeroWeight
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.weight_reader import WeightReader


class WeightScales:
    """Computes scales from magnitudes.

    A row or block of zeros takes the largest scale of its weight. A weight of zeros takes the scale
    of its group; else the largest scale of the same projection in other experts; else the largest
    scale of its layer; else 1. In MXFP8, zeros have the smallest exponent, as ModelOpt writes them.
    """

    def __init__(self, quantized: Collection[Matrix], reader: WeightReader) -> None:
        self._reader = reader
        self._pools: dict[tuple[str, str], list[Matrix]] = defaultdict(list)
        for matrix in quantized:
            for pool in _name_pools(matrix):
                self._pools[pool].append(matrix)

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
    return row_amax(values)


def _count_zeros(matrix: Matrix, amax: torch.Tensor) -> AllZeroWeight | None:
    count = int((amax == 0).sum())
    return AllZeroWeight(tensor=matrix.tensor, count=count, total=amax.numel()) if count else None
