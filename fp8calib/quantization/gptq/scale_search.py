"""Choose the scale of each row or block of a weight: twice the smallest one, or less.

Floats of 3 mantissa bits step by 1/8 of a number just above a power of two, and by 1/15 of one just
below the next. A scale up to twice as large saturates nothing, and can move the large numbers of a
row to where the steps are small.
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from fp8calib.fp8.encode import encode_rows
from fp8calib.fp8.schemes import Granularity, Scheme
from fp8calib.quantization.weight_scales import spread_scales

STEPS = 8
"""Scales that are tried; each is 2^(1/8) times the one before."""


def searches_scales(scheme: Scheme) -> bool:
    """Tell whether weights of a scheme have scales of their own that can be any number.

    A scale per tensor is shared by the weights that engines fuse, and covers too many numbers.
    """
    return scheme.weights is not Granularity.TENSOR and not scheme.has_power_of_two_scales


def search_scales(
    weight: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Find the scales with the least squared error of rounding to nearest: fp32, as `scales`.

    Args:
        weight: [R, C].
        scales: the smallest ones that saturate nothing, one per row or block.
        importance: by which the errors of each column are multiplied: fp32 [C].
        scheme: with rows or blocks.
    """
    wide = weight.to(torch.float32)
    best, least = scales, _sum_errors(wide, scales, importance, scheme)
    for step in range(1, STEPS):
        tried = scales * 2 ** (step / STEPS)
        errors = _sum_errors(wide, tried, importance, scheme)
        best = torch.where(errors < least, tried, best)
        least = torch.minimum(errors, least)
    return best


def _sum_errors(
    weight: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor, scheme: Scheme
) -> torch.Tensor:
    """Sum the squared errors of each row or block: fp32, as `scales`."""
    spread = spread_scales(scales, tuple(weight.shape), scheme)
    errors = encode_rows(weight, spread).to(torch.float32).mul_(spread).sub_(weight)
    if scheme.weights is not Granularity.BLOCK:
        return errors.square_() @ importance
    errors = errors.square_().mul_(importance)
    rows, columns = scheme.block
    padded = pad(errors, (0, -errors.shape[1] % columns, 0, -errors.shape[0] % rows))
    return padded.view(scales.shape[0], rows, scales.shape[1], columns).sum((1, 3))
