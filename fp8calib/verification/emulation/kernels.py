"""Fake-quantize a tensor on a GPU, and sum up the damage, in one kernel.

The values are those of torch's operations in `fake_quantize`, bit for bit. Importing this needs
Triton, which torch's builds for CUDA come with.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fp8calib.calibration import kernels
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.damage import SummedDamage, clip_limit
from fp8calib.verification.emulation.fake_quantize import Quantizer

_WIDE = 256
"""Rows of more elements are taken a few at a time: the more programs share them."""
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_SIGN = tl.constexpr(-(2**31))


def fake_quantize(
    x: torch.Tensor, quantizer: Quantizer, *, flush_stride: int
) -> tuple[torch.Tensor, SummedDamage]:
    """Quantize and dequantize [B, H, S, D], as `quantizer.fits_kernel` allows.

    Args:
        x: the tensor.
        quantizer: its static scales are on the device of `x`: one, or one for each head.
        flush_stride: the stride of the tokens in which zeros are counted.

    Returns:
        A tensor like `x`, and what that does to its elements.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(x)
    batch, heads, length, width = x.shape
    num_rows, num_columns = (4, 512) if width > _WIDE else (16, 128)
    grid = (triton.cdiv(length, num_rows), heads, batch)
    sums = torch.empty(math.prod(grid), 6, dtype=torch.float64, device=x.device)
    scale, fmt = quantizer.scale, quantizer.fmt
    is_static = isinstance(scale, torch.Tensor)
    constants: dict[str, Any] = {
        "per_head": isinstance(scale, torch.Tensor) and scale.numel() > 1,
        "per_token": scale is Granularity.TOKEN,
        "by_reciprocal": quantizer.by_reciprocal,
        "in_model_dtype": quantizer.in_model_dtype,
        "scale_by_reciprocal": quantizer.scale_by_reciprocal,
        "most": fmt.max,
        "smallest_normal": fmt.smallest_normal,
        "carry": 2.0 ** (23 - fmt.mantissa_bits),
        "flush_stride": flush_stride,
        "num_rows": num_rows,
        "num_columns": num_columns,
    }
    bound = math.inf if quantizer.largest_amax is None else quantizer.largest_amax
    limit = clip_limit(fmt, saturates=quantizer.saturates) if quantizer.clips else math.inf
    kernels.launch(
        _fake_quantize,
        grid,
        x,
        *(y, scale if is_static else x, sums, *x.stride()[:3], *y.stride()[:3], length, width),
        *(limit, bound, quantizer.smallest_scale, (1 / torch.tensor(fmt.max)).item()),
        **constants,
        enable_fp_fusion=False,
        num_warps=8,
    )
    num_chosen = batch * heads * triton.cdiv(length, flush_stride) * width
    return y, SummedDamage(sums=sums, num_elements=x.numel(), num_chosen=num_chosen)


@triton.jit
def _widen(stored):  # type: ignore[no-untyped-def]
    """Convert to fp32 exactly; the interpreter loses subnormals of bfloat16 otherwise."""
    if stored.dtype == tl.bfloat16:
        return (stored.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:  # noqa: RET505 -- the compiler needs both branches
        return stored.to(tl.float32)


@triton.jit
def _round_like(values, stored):  # type: ignore[no-untyped-def]
    """Round fp32 to the dtype of `stored`, to nearest; the interpreter truncates to bfloat16."""
    if stored.dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        upper = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        upper = tl.where(values != values, 0x7FC0, upper)  # noqa: PLR0124 -- NaN
        return upper.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:  # noqa: RET505 -- the compiler needs both branches
        return values.to(stored.dtype)


@triton.jit(do_not_specialize=["limit", "bound", "smallest_scale", "inverse"])  # type: ignore[untyped-decorator]
def _fake_quantize(  # type: ignore[no-untyped-def]  # noqa: PLR0915 -- one kernel
    x,
    y,
    scales,
    sums,
    stride_batch,
    stride_head,
    stride_row,
    stride_batch_y,
    stride_head_y,
    stride_row_y,
    length,
    width,
    limit,
    bound,
    smallest_scale,
    inverse,
    per_head: tl.constexpr,
    per_token: tl.constexpr,
    by_reciprocal: tl.constexpr,
    in_model_dtype: tl.constexpr,
    scale_by_reciprocal: tl.constexpr,
    most: tl.constexpr,
    smallest_normal: tl.constexpr,
    carry: tl.constexpr,
    flush_stride: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
):
    head, sequence = tl.program_id(1), tl.program_id(2)
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    wide = rows.to(tl.int64)[:, None]
    place = x + sequence.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    place += wide * stride_row
    target = y + sequence.to(tl.int64) * stride_batch_y + head.to(tl.int64) * stride_head_y
    target += wide * stride_row_y

    if per_token:
        tops = tl.zeros([num_rows, num_columns], tl.int32)
        for start in range(0, width, num_columns):
            columns = start + tl.arange(0, num_columns)
            is_inside = (rows < length)[:, None] & (columns < width)[None, :]
            exact = _widen(tl.load(place + columns[None, :], mask=is_inside, other=0.0))
            tops = tl.maximum(tops, exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        amax = tl.max(tops, 1).to(tl.float32, bitcast=True)
        amax = tl.minimum(amax, bound, propagate_nan=_ALL)
        if scale_by_reciprocal:
            scale = amax * inverse
        else:
            scale = tl.math.div_rn(amax, tl.full([num_rows], most, tl.float32))
        scale = tl.maximum(scale, smallest_scale, propagate_nan=_ALL)[:, None]
    elif per_head:
        scale = tl.load(scales + head)
    else:
        scale = tl.load(scales)
    scale = tl.zeros([num_rows, num_columns], tl.float32) + scale
    factor = tl.math.div_rn(tl.full([num_rows, num_columns], 1.0, tl.float32), scale)

    signal = tl.zeros([num_rows, num_columns], tl.float64)
    noise = tl.zeros([num_rows, num_columns], tl.float64)
    clipped = tl.zeros([num_rows, num_columns], tl.int32)
    before = tl.zeros([num_rows, num_columns], tl.int32)
    after = tl.zeros([num_rows, num_columns], tl.int32)
    tops = tl.zeros([num_rows, num_columns], tl.int32)
    for start in range(0, width, num_columns):
        columns = start + tl.arange(0, num_columns)
        is_inside = (rows < length)[:, None] & (columns < width)[None, :]
        stored = tl.load(place + columns[None, :], mask=is_inside, other=0.0)
        exact = _widen(stored)
        if in_model_dtype:
            divided = tl.math.div_rn(exact, _widen(_round_like(scale, stored)))
            scaled = _widen(_round_like(divided, stored))
        elif by_reciprocal:
            scaled = exact * factor
        else:
            scaled = tl.math.div_rn(exact, scale)
        inside = tl.minimum(tl.maximum(scaled, -most, propagate_nan=_ALL), most, propagate_nan=_ALL)
        # Adding a number whose last place is a step of the format rounds to whole steps.
        bits = inside.to(tl.int32, bitcast=True)
        large = (bits & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(large, smallest_normal) * carry
        magnitude = (tl.abs(inside) + large) - large
        signed = magnitude.to(tl.int32, bitcast=True) | (bits & _SIGN)
        values = signed.to(tl.float32, bitcast=True) * scale
        tl.store(target + columns[None, :], _round_like(values, stored), mask=is_inside)

        wide_exact, error = exact.to(tl.float64), (values - exact).to(tl.float64)
        signal += wide_exact * wide_exact
        noise += tl.where(is_inside, error * error, 0.0)
        clipped += (tl.abs(scaled) > limit).to(tl.int32)
        is_chosen = is_inside & (rows % flush_stride == 0)[:, None]
        before += (is_chosen & (exact != 0)).to(tl.int32)
        after += (is_chosen & (values != 0)).to(tl.int32)
        tops = tl.maximum(tops, exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF)

    number = (sequence * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    own = sums + number.to(tl.int64) * 6
    tl.store(own, tl.sum(signal))
    tl.store(own + 1, tl.sum(noise))
    tl.store(own + 2, tl.sum(clipped).to(tl.float64))
    tl.store(own + 3, tl.sum(before).to(tl.float64))
    tl.store(own + 4, tl.sum(after).to(tl.float64))
    tl.store(own + 5, tl.max(tops).to(tl.float32, bitcast=True).to(tl.float64))
