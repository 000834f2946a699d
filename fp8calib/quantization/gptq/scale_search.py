"""Choose the scale of each row of a weight: twice the smallest one, or less.

Floats of 3 mantissa bits step by 1/8 of a number just above a power of two, and by 1/15 of one just
below the next. A scale up to twice as large saturates nothing, and can move the large numbers of a
row to where the steps are small.
"""

from __future__ import annotations

import torch

from fp8calib.fp8.cast import round_to_format_
from fp8calib.fp8.formats import E4M3FN
from fp8calib.fp8.schemes import Granularity, Scheme

STEPS = 8
"""Scales that are tried; each is 2^(1/8) times the one before."""


def searches_scales(scheme: Scheme) -> bool:
    """Tell whether each row of a weight has a scale of its own, which engines take as it is.

    A scale per tensor is shared by the weights that engines fuse, and covers too many numbers.
    Those of blocks are rounded to powers of two by vLLM's DeepGEMM, which undoes the choice.
    """
    return scheme.weights is Granularity.CHANNEL


def search_scales(
    weight: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor
) -> torch.Tensor:
    """Find the scales with the least squared error of rounding to nearest: fp32 [R].

    Args:
        weight: [R, C].
        scales: the smallest ones that saturate nothing: fp32 [R].
        importance: by which the errors of each column are multiplied: fp32 [C].
    """
    wide = weight.to(torch.float32)
    best, least = scales, _sum_errors(wide, scales, importance)
    for step in range(1, STEPS):
        tried = scales * 2 ** (step / STEPS)
        errors = _sum_errors(wide, tried, importance)
        best = torch.where(errors < least, tried, best)
        least = torch.minimum(errors, least)
    return best


def _sum_errors(
    weight: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor
) -> torch.Tensor:
    """Sum the squared errors of each row: fp32 [R]."""
    spread = scales.unsqueeze(1)
    errors = round_to_format_(weight / spread, E4M3FN).mul_(spread).sub_(weight)
    return errors.square_() @ importance
