"""Exact casts to the FP8 formats: values in, representable values or codes out.

Everything is computed in fp32, where each step is exact: a magnitude is divided by the distance
between its neighbours in the format (a power of two), rounded to a whole number, and multiplied
back. torch's own casts differ by version (2.13 saturates only e4m3fn), so every cast clamps first.
On a GPU torch's casts round to nearest: they give the same values in two kernels, not seven. On a
CPU their way back to fp32 takes longer than everything here.
"""

from __future__ import annotations

import torch

from fp8calib.numerics.formats import Fp8Format, Rounding


def round_to_format(
    x: torch.Tensor, fmt: Fp8Format, rounding: Rounding = "nearest-even"
) -> torch.Tensor:
    """Give the representable value of each element: fp32, the shape of `x`.

    Magnitudes above `fmt.max`, infinity included, saturate; NaN stays NaN; the sign of zero is kept
    where the format has one.
    """
    return round_to_format_(x.to(torch.float32, copy=True), fmt, rounding)


def round_to_format_(
    x: torch.Tensor,
    fmt: Fp8Format,
    rounding: Rounding = "nearest-even",
    *,
    saturate: bool = True,
) -> torch.Tensor:
    """Round the fp32 tensor `x` in place, as `round_to_format` does.

    Pass `saturate=False` only where no magnitude rounds beyond `fmt.max`.
    """
    if saturate:
        x.clamp_(-fmt.max, fmt.max)
    if x.device.type != "cpu" and rounding == "nearest-even":
        return round_by_torch_(x, fmt)
    powers_of_two = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    steps = powers_of_two.clamp_(min=fmt.smallest_normal).mul_(2.0**-fmt.mantissa_bits)
    x.div_(steps)
    # toward zero without `torch.trunc`, which takes four times as long on a CPU
    is_nearest = rounding == "nearest-even"
    whole = x.round_() if is_nearest else torch.copysign(x.abs().floor_(), x)
    values = whole.mul_(steps)
    # Adding zero turns -0.0 into the only zero that the FNUZ formats have.
    return values.add_(0.0) if fmt.specials == "negative-zero" else values


def round_positive_(x: torch.Tensor, fmt: Fp8Format, *, scale: float) -> torch.Tensor:
    """Round the fp32 tensor `x` to nearest in place, as x / scale is rounded times `scale`.

    No element is negative or rounds beyond `fmt.max * scale`, and `scale` is a power of two. A
    number whose last place is a step of the format is added, which rounds to whole steps, and
    subtracted: half the time of `round_to_format_` and a division.
    """
    large = (x.view(torch.int32) & 0x7F800000).view(torch.float32)
    large.clamp_(min=fmt.smallest_normal * scale).mul_(2.0 ** (23 - fmt.mantissa_bits))
    return x.add_(large).sub_(large)


def round_by_torch_(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Round `x` in place to nearest by torch's cast; no magnitude may round beyond `fmt.max`."""
    return x.copy_(x.to(getattr(torch, fmt.dtype_name)))


def encode(x: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Give the code of each element, rounded to nearest: uint8, the shape of `x`."""
    clamped = x.to(torch.float32).clamp(-fmt.max, fmt.max)
    codes = clamped.to(getattr(torch, fmt.dtype_name)).view(torch.uint8)
    nan_code = 0x80 if fmt.specials == "negative-zero" else 0x7F
    return codes.masked_fill_(clamped.isnan(), nan_code)
