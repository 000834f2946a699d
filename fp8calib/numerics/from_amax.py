"""Turn magnitudes into scales: amax / fmt.max in fp32, or powers of two."""

from __future__ import annotations

import math

import torch

from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format


def scale_of(
    amax: torch.Tensor, fmt: Fp8Format, *, smallest: float = SMALLEST_SCALE
) -> torch.Tensor:
    """Turn magnitudes into scales: amax / fmt.max in fp32, at least `smallest`."""
    # By a tensor of its device: by a number, CUDA would multiply with the reciprocal, 1 ulp off.
    most = amax.new_full((), fmt.max, dtype=torch.float32)
    return (amax.to(torch.float32) / most).clamp(min=smallest)


def power_of_two_scale_of(
    amax: torch.Tensor, fmt: Fp8Format, *, smallest: float = SMALLEST_SCALE, saturates: bool = False
) -> torch.Tensor:
    """Turn magnitudes into powers of two, the smallest with which nothing saturates.

    Exponents are compared and nothing is divided, so that no rounding moves a magnitude over an
    edge. Scales are at least `smallest`. With `saturates` they follow the OCP Microscaling Formats
    1.0: floor(log2(amax)) less the exponent of `fmt.max`, so that magnitudes whose mantissa is
    above that of `fmt.max` saturate.
    """
    most, last = math.frexp(fmt.max)
    mantissa, exponent = torch.frexp(amax.to(torch.float32).clamp(min=smallest * fmt.max))
    exponent = exponent - last + (0 if saturates else (mantissa > most).int())
    return torch.ldexp(torch.ones_like(mantissa), exponent)
