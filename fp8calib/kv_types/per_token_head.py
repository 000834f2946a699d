"""Types with a scale for every token and head.

Read in vLLM 0.32.0: v1/attention/ops/triton_reshape_and_cache_flash.py
_reshape_cache_per_token_head and v1/attention/ops/int4_per_token_head.py
_reshape_cache_int4_kernel, _attn_packed.
"""

from __future__ import annotations

import torch

from fp8calib.kv_types.rotations import rotate_back, rotate_randomly
from fp8calib.numerics.amax import row_amax
from fp8calib.numerics.cast import round_to_format
from fp8calib.numerics.formats import E4M3FN

_SMALLEST_SCALE = 1e-6
_INT8_MAX = 127.0
_INT4_LEVELS = 15
_ZERO_POINT_BITS = 0xF
"""The lowest bits of an INT4 scale hold the zero point."""


def fp8(x: torch.Tensor) -> torch.Tensor:
    """Store in E4M3 and read back: fp32, the shape of `x` [..., D]."""
    scale = (row_amax(x).unsqueeze(-1) / E4M3FN.max).clamp(min=_SMALLEST_SCALE)
    return round_to_format(x.float() * scale.reciprocal(), E4M3FN) * scale


def int8(x: torch.Tensor) -> torch.Tensor:
    """Store in 8-bit integers, halves away from zero, and read back: fp32, the shape of `x`."""
    scale = (row_amax(x).unsqueeze(-1) / _INT8_MAX).clamp(min=_SMALLEST_SCALE)
    codes = _round_half_away(x.float() * scale.reciprocal())
    return codes.clamp(-_INT8_MAX - 1, _INT8_MAX) * scale


def int4(x: torch.Tensor) -> torch.Tensor:
    """Rotate, store in 4-bit integers with a zero point, and read back: fp32, the shape of `x`.

    What the kernel multiplies is rotated, as q is; rotated back it is the same K and V.
    """
    return rotate_back(int4_as_rotated(rotate_randomly(x)))


def int4_as_rotated(x: torch.Tensor) -> torch.Tensor:
    """Store rotated vectors [..., D], and read them back, still rotated: fp32."""
    x = x.float()
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    scale = ((high - low) / _INT4_LEVELS).clamp(min=_SMALLEST_SCALE)
    zero_point = _round_half_away(-low / scale).clamp(0, _INT4_LEVELS)
    codes = _round_half_away(x * scale.reciprocal() + zero_point).clamp(0, _INT4_LEVELS)
    stored = (scale.view(torch.int32) & ~_ZERO_POINT_BITS).view(torch.float32)
    return (codes - zero_point) * stored


def _round_half_away(x: torch.Tensor) -> torch.Tensor:
    return (x + torch.copysign(torch.tensor(0.5, device=x.device), x)).trunc()
