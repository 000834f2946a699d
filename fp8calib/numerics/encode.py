"""Magnitudes become scales, and rows of a weight with their scales e4m3fn codes; and back.

Codes come from torch's cast to `float8_e4m3fn` behind a clamp.
"""

from __future__ import annotations

import math

import torch

from fp8calib.numerics.formats import E4M3FN, SMALLEST_SCALE, Fp8Format


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
    """Turn magnitudes of any shape into fp32 powers of two, the smallest that saturate nothing.

    Exponents are compared and nothing is divided, so that no rounding moves a magnitude over an
    edge. Scales are at least `smallest`. With `saturates` they follow the OCP Microscaling Formats
    1.0: floor(log2(amax)) less the exponent of `fmt.max`, so that magnitudes whose mantissa is
    above that of `fmt.max` saturate.
    """
    most, last = math.frexp(fmt.max)
    mantissa, exponent = torch.frexp(amax.to(torch.float32).clamp(min=smallest * fmt.max))
    exponent = exponent - last + (0 if saturates else (mantissa > most).int())
    return torch.ldexp(torch.ones_like(mantissa), exponent)


def encode_rows(rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Divide in fp32, saturate, round to nearest even: float8_e4m3fn of the shape of `rows`.

    Args:
        rows: [R, C] without NaN.
        scale: fp32 on the device of `rows`, broadcasts to them; it multiplies to dequantize.
    """
    scaled = rows.to(torch.float32, copy=True).div_(scale)
    return scaled.clamp_(-E4M3FN.max, E4M3FN.max).to(torch.float8_e4m3fn)


def encode_blocks(rows: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """Encode as `encode_rows`, with a scale per block: [ceil(R / rows), ceil(C / columns)]."""
    num_rows, num_columns = block
    if num_rows == 1 and rows.shape[1] % num_columns == 0:
        groups = rows.reshape(len(rows), -1, num_columns)
        return encode_rows(groups, scale.unsqueeze(2)).flatten(1)
    spread = scale.repeat_interleave(num_columns, dim=1)[:, : rows.shape[1]]
    strips = zip(torch.split(rows, num_rows), spread, strict=True)
    return torch.cat([encode_rows(strip, columns) for strip, columns in strips])


def encode_exponents(scales: torch.Tensor) -> torch.Tensor:
    """Encode powers of two from 2^-127 to 2^127 as E8M0: uint8, the exponent plus 127."""
    return (torch.frexp(scales).exponent + 126).to(torch.uint8)


def decode_scale(stored: torch.Tensor) -> torch.Tensor:
    """Give the scales that a checkpoint stores, in fp32: numbers, or the exponents of MXFP8.

    Exponents are uint8 (E8M0); 255 is NaN.
    """
    if stored.dtype is torch.uint8:
        return stored.view(torch.float8_e8m0fnu).to(torch.float32)
    return (stored.real if stored.is_complex() else stored).to(torch.float32)


def decode_rows(codes: torch.Tensor) -> torch.Tensor:
    """Give the fp32 value of FP8 codes of any dtype, in a new tensor.

    On a CPU, torch's own cast of float8_e4m3fn takes six times as long.
    """
    is_fast = codes.dtype is torch.float8_e4m3fn and codes.device.type == "cpu" and codes.numel()
    if not is_fast or int((codes.view(torch.uint8) & 127).max()) == 127:  # that is NaN
        return codes.to(torch.float32)
    # Sign, exponent and mantissa at their places in fp32; the exponents differ by 127 - 7.
    bits = codes.view(torch.int8).to(torch.int32).bitwise_left_shift_(20)
    return bits.bitwise_and_(-0x78100000).view(torch.float32).mul_(2.0**120)
