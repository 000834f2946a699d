"""Round weights to e4m3fn so that later columns compensate for the errors of earlier ones.

GPTQ (Frantar et al., arXiv 2210.17323): a column is rounded, then the columns not yet rounded move
so that the output error, weighted by the Hessian H of the inputs, is smallest. Arrays in, arrays
out; no model.

The scale of a row may be up to twice the smallest one that saturates nothing. Floats of 3 mantissa
bits step by 1/8 of a number just above a power of two, and by 1/15 of one just below the next; a
larger scale can move the large numbers of a row to where the steps are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from fp8calib.numerics.cast import round_to_format_
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.schemes import Granularity, Scheme

DAMPING = 0.01
SCALE_STEPS = 8
"""The number of scales that are tried; each is 2^(1/8) times the one before."""
_RAISE = 10.0
"""The factor by which damping grows until the Hessian can be factorised."""
_MAX = E4M3FN.max
_LEAF = 16
"""Columns that are rounded one by one; the updates of more columns are matrix products."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HessianFactor:
    """A Hessian, prepared to round any weight that reads its inputs."""

    order: torch.Tensor
    """The inputs, in the order of rounding their columns: int64 [in]."""
    upper: torch.Tensor
    """U with U^T U = H^-1, inputs in `order`, upper triangular: float64 [in, in]."""
    damping: float
    """The share of its mean that was added to the diagonal; more than asked for if H was not
    positive definite."""


def factorise(hessian: torch.Tensor) -> HessianFactor:
    """Prepare a Hessian [in, in] for `round_compensated`, in float64.

    Columns are rounded by falling diagonal. Inputs that were always zero cause no error; their
    columns are rounded to nearest.

    Args:
        hessian: the weighted sum of x x^T over inputs x, finite. `DAMPING` times the mean of its
            diagonal is added to it. While the sum is not positive definite, ten times as much is
            tried.

    Raises:
        ValueError: the Hessian is not finite.
    """
    damping = DAMPING
    diagonal = hessian.diagonal().to(torch.float64)
    mean = float(diagonal.mean())
    if not math.isfinite(mean):
        raise ValueError("the Hessian is not finite")
    order = torch.argsort(diagonal, descending=True, stable=True)
    eye = torch.eye(len(diagonal), dtype=torch.float64, device=hessian.device)
    if mean <= 0:
        return HessianFactor(order=order, upper=eye, damping=damping)
    # H = R R^T with R upper triangular is the Cholesky factor of H backwards; then U = R^-1.
    backwards = order.flip(0)
    damped = hessian[backwards][:, backwards].to(torch.float64)
    damped.diagonal().add_(damping * mean)
    lower, info = torch.linalg.cholesky_ex(damped)
    while int(info):
        damped.diagonal().add_((_RAISE - 1) * damping * mean)
        damping *= _RAISE
        lower, info = torch.linalg.cholesky_ex(damped)
    del damped
    upper = torch.linalg.solve_triangular(lower.flip(0, 1), eye, upper=True)
    return HessianFactor(order=order, upper=upper, damping=damping)


def round_compensated(
    weight: torch.Tensor, scale: torch.Tensor, factor: HessianFactor
) -> torch.Tensor:
    """Round a weight [out, in] with given scales: float8_e4m3fn [out, in].

    Args:
        weight: finite. It is computed in float32, or in float64 if that is its dtype.
        scale: multiplies codes to dequantize; broadcasts to [out, in].
        factor: the result of `factorise` for the same inputs.
    """
    dtype = torch.promote_types(weight.dtype, torch.float32)
    columns = weight.T.to(dtype)[factor.order].contiguous()
    scales = scale.to(dtype).expand(-1, weight.shape[1]).T[factor.order]
    rounding = _Rounding(columns, scales, factor.upper.to(dtype))
    rounding.run(0, len(columns))
    codes = torch.empty_like(rounding.codes)
    codes[factor.order] = rounding.codes
    return codes.T.contiguous().view(torch.float8_e4m3fn)


class _Rounding:
    """The state of one weight: its columns in order, as rows [in, out]."""

    def __init__(self, columns: torch.Tensor, scales: torch.Tensor, upper: torch.Tensor) -> None:
        self.codes = torch.empty(columns.shape, dtype=torch.uint8, device=columns.device)
        self._columns = columns
        self._errors = torch.empty_like(columns)
        self._upper = upper
        as_fp8 = self.codes.view(torch.float8_e4m3fn)
        parts = (columns, scales, self._errors, as_fp8)
        self._rows = list(zip(*(each.unbind() for each in parts), strict=True))
        self._diagonal = upper.diagonal().tolist()

    def run(self, start: int, stop: int) -> None:
        """Round columns `start` to `stop`, to which all earlier errors have been applied."""
        if stop - start <= _LEAF:
            for index in range(start, stop):
                self._round(index, stop)
            return
        middle = (start + stop) // 2
        self.run(start, middle)
        update = self._upper[start:middle, middle:stop].T
        self._columns[middle:stop].addmm_(update, self._errors[start:middle], alpha=-1)
        self.run(middle, stop)

    def _round(self, index: int, stop: int) -> None:
        column, scale, error, code = self._rows[index]
        torch.div(column, scale, out=error).clamp_(-_MAX, _MAX)
        code.copy_(error)
        error.copy_(code).mul_(scale)
        torch.sub(column, error, out=error).div_(self._diagonal[index])
        later = self._columns[index + 1 : stop]
        later.addr_(self._upper[index, index + 1 : stop], error, alpha=-1)


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """Compute tr(D H D^T), the squared output error of a change D [out, in], in the dtype of D."""
    return float((difference @ hessian.to(difference.dtype)).mul_(difference).sum())


def searches_scales(scheme: Scheme) -> bool:
    """Tell whether each row of a weight has its own scale, which engines use unchanged.

    A scale per tensor is shared by the weights that engines fuse, and covers too many numbers.
    vLLM's DeepGEMM rounds scales of blocks to powers of two, which undoes the choice.
    """
    return scheme.weights is Granularity.CHANNEL


def search_scales(
    weight: torch.Tensor, scales: torch.Tensor, importance: torch.Tensor
) -> torch.Tensor:
    """Find the scales with the least squared error of rounding to nearest: fp32 [R].

    Args:
        weight: [R, C].
        scales: the smallest that saturate nothing: fp32 [R].
        importance: the factor on the errors of each column: fp32 [C].
    """
    wide = weight.to(torch.float32)
    best, least = scales, _sum_errors(wide, scales, importance)
    for step in range(1, SCALE_STEPS):
        tried = scales * 2 ** (step / SCALE_STEPS)
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
