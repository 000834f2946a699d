"""Fake-quantize a tensor or softmax's P on a GPU, and sum up the damage, each in one kernel.

The values are those of torch's operations in `fake_quantize`, bit for bit, and in `probabilities`
but for the last places of exp. Importing this needs Triton, which torch's builds for CUDA have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
import triton.language as tl

from fp8calib.calibration import kernels
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.fake_quantize import DamageRow, Quantizer

_WIDE = 256
"""Rows of more elements are taken a few at a time: the more programs share them."""
_ALL = tl.constexpr(tl.PropagateNan.ALL)
_SIGN = tl.constexpr(-(2**31))
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


def fake_quantize(
    x: torch.Tensor,
    quantizer: Quantizer,
    *,
    flush_stride: int,
    counted: tuple[torch.Tensor, int] | None = None,
) -> tuple[torch.Tensor, DamageRow]:
    """Quantize and dequantize [B, H, S, D], as `quantizer.fits_kernel` allows.

    Args:
        x: the tensor.
        quantizer: its static scales are on the device of `x`: one, or one for each head.
        flush_stride: the stride of the tokens in which zeros are counted.
        counted: which tokens are measured, and how many: the number of each among them, -1 for
            others, int32 [B * S] on the device of `x`. None: all, numbered in each sequence.

    Returns:
        A tensor like `x`, and what that does to its elements.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty_like(x)
    batch, heads, length, width = x.shape
    num_rows, num_columns = (4, 512) if width > _WIDE else (16, 128)
    grid = (triton.cdiv(length, num_rows), heads, batch)
    sums = torch.empty(math.prod(grid), 6, dtype=torch.float64, device=x.device)
    fmt, scale = quantizer.fmt, quantizer.scale
    if scale is Granularity.TENSOR:
        scale = quantizer.scale_for(x)
    is_static = isinstance(scale, torch.Tensor)
    constants: dict[str, Any] = {
        "per_head": isinstance(scale, torch.Tensor) and scale.numel() > 1,
        "per_token": scale is Granularity.TOKEN,
        "group": quantizer.block[1] if scale is Granularity.GROUP else 0,
        "by_reciprocal": quantizer.by_reciprocal,
        "in_model_dtype": quantizer.in_model_dtype,
        "scale_by_reciprocal": quantizer.scale_by_reciprocal,
        "power_of_two": quantizer.power_of_two,
        "has_one_zero": fmt.specials == "negative-zero",
        **_describe(fmt),
        "is_masked": counted is not None,
        "flush_stride": flush_stride,
        "num_rows": num_rows,
        "num_columns": num_columns,
    }
    bound = math.inf if quantizer.largest_amax is None else quantizer.largest_amax
    kernels.launch(
        _fake_quantize,
        grid,
        x,
        *(y, scale if is_static else x, x if counted is None else counted[0], sums),
        *(*x.stride()[:3], *y.stride()[:3], length, width),
        *(
            quantizer.clip_limit,
            bound,
            quantizer.smallest_scale,
            (1 / torch.tensor(fmt.max)).item(),
        ),
        **constants,
        enable_fp_fusion=False,
        num_warps=8,
    )
    num_tokens, num_chosen = batch * length, batch * triton.cdiv(length, flush_stride)
    if counted is not None:
        num_tokens, num_chosen = counted[1], triton.cdiv(counted[1], flush_stride)
    per_token = heads * width
    return y, (sums, num_tokens * per_token, num_chosen * per_token)


def round_probabilities_(
    scores: torch.Tensor,
    quantizer: Quantizer,
    *,
    first_row: int | None,
    sinks: torch.Tensor | None,
    counted: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, DamageRow | None]:
    """Turn contiguous scores into softmax's numerators, as torch in `probabilities.py`, in place.

    The static scale of `quantizer` is a power of two, on the device of `scores`. Sums are not below
    the smallest normal fp32.
    """
    heads, length, num_keys = scores.shape
    totals = scores.new_empty(heads, length, 1)
    is_tiled = 0 < quantizer.tile < num_keys
    tile = quantizer.tile if is_tiled else _WIDE
    num_columns = triton.next_power_of_2(tile)
    num_rows = max(1, 2048 // num_columns)
    grid = (triton.cdiv(length, num_rows), heads)
    is_counted = sums = scores
    if counted is not None:
        chosen = torch.zeros(length, dtype=torch.int8)
        chosen[counted] = 1
        is_counted = chosen.to(scores.device, non_blocking=True)
        sums = torch.empty(math.prod(grid), 6, dtype=torch.float64, device=scores.device)
    kernels.launch(
        _round_probabilities,
        grid,
        scores,
        *(totals, quantizer.scale, scores if sinks is None else sinks, is_counted, sums),
        *(length, num_keys, num_keys if first_row is None else first_row, tile),
        has_sinks=sinks is not None,
        measures=counted is not None,
        is_tiled=is_tiled,
        **_describe(quantizer.fmt),
        num_rows=num_rows,
        num_columns=num_columns,
        enable_fp_fusion=False,
        num_warps=8,
    )
    if counted is None:
        return scores, totals, None
    count = heads * len(counted) * num_keys
    return scores, totals, (sums, count, count)


def _describe(fmt: Fp8Format) -> dict[str, float]:
    return {
        "most": fmt.max,
        "smallest_normal": fmt.smallest_normal,
        "carry": 2.0 ** (23 - fmt.mantissa_bits),
    }


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


@triton.jit  # type: ignore[untyped-decorator]
def _round_magnitudes(values, smallest: tl.constexpr, carry: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round fp32, none of it beyond the largest value of the format: magnitudes of the format."""
    # Adding a number whose last place is a step of the format rounds to whole steps.
    large = (values.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    large = tl.maximum(large, smallest) * carry
    return (tl.abs(values) + large) - large


@triton.jit  # type: ignore[untyped-decorator]
def _find_scales(  # type: ignore[no-untyped-def]
    tops,
    bound,
    smallest_scale,
    inverse,
    scale_by_reciprocal: tl.constexpr,
    power_of_two: tl.constexpr,
    most: tl.constexpr,
):
    """Compute scales of the codes of the largest magnitudes, as `Quantizer.scale_for` does."""
    amax = tl.minimum(tops.to(tl.float32, bitcast=True), bound, propagate_nan=_ALL)
    if power_of_two:
        amax = tl.maximum(amax, smallest_scale * most, propagate_nan=_ALL)
        bits = amax.to(tl.int32, bitcast=True)
        # To torch the exponent of infinity, and of NaN, is that of numbers from 0.5 to 1.
        exponent = tl.where(bits < 0x7F800000, bits >> 23, 126)
        limit = tl.full(tops.shape, most, tl.float32).to(tl.int32, bitcast=True)
        is_above = ((bits & 0x7FFFFF) > (limit & 0x7FFFFF)) & (bits < 0x7F800000)
        is_above = is_above | (bits == 0x7F800000)
        exponent += 127 - (limit >> 23) + is_above.to(tl.int32)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
    elif scale_by_reciprocal:
        scale = tl.maximum(amax * inverse, smallest_scale, propagate_nan=_ALL)
    else:
        scale = tl.math.div_rn(amax, tl.full(tops.shape, most, tl.float32))
        scale = tl.maximum(scale, smallest_scale, propagate_nan=_ALL)
    return scale


@triton.jit(do_not_specialize=["limit", "bound", "smallest_scale", "inverse"])  # type: ignore[untyped-decorator]
def _fake_quantize(  # type: ignore[no-untyped-def]  # noqa: PLR0912, PLR0915 -- one kernel
    x,
    y,
    scales,
    places,
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
    group: tl.constexpr,
    by_reciprocal: tl.constexpr,
    in_model_dtype: tl.constexpr,
    scale_by_reciprocal: tl.constexpr,
    power_of_two: tl.constexpr,
    has_one_zero: tl.constexpr,
    most: tl.constexpr,
    smallest_normal: tl.constexpr,
    carry: tl.constexpr,
    is_masked: tl.constexpr,
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
    numbers = rows
    if is_masked:
        places += sequence.to(tl.int64) * length
        numbers = tl.load(places + rows, mask=rows < length, other=-1)

    if per_token:
        tops = tl.zeros([num_rows, num_columns], tl.int32)
        for start in range(0, width, num_columns):
            columns = start + tl.arange(0, num_columns)
            is_inside = (rows < length)[:, None] & (columns < width)[None, :]
            exact = _widen(tl.load(place + columns[None, :], mask=is_inside, other=0.0))
            tops = tl.maximum(tops, exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
        scale = _find_scales(
            *(tl.max(tops, 1), bound, smallest_scale, inverse),
            *(scale_by_reciprocal, power_of_two, most),
        )[:, None]
    elif per_head:
        scale = tl.load(scales + head)
    elif not group:
        scale = tl.load(scales)
    else:
        scale = 1.0  # each group has its own
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
        codes = exact.to(tl.int32, bitcast=True) & 0x7FFFFFFF
        if group:
            groups = tl.reshape(codes, [num_rows, num_columns // group, group])
            scale = _find_scales(
                *(tl.max(groups, 2), bound, smallest_scale, inverse),
                *(scale_by_reciprocal, power_of_two, most),
            )
            spread = tl.broadcast_to(scale[:, :, None], [num_rows, num_columns // group, group])
            scale = tl.reshape(spread, [num_rows, num_columns])
            factor = tl.math.div_rn(tl.full([num_rows, num_columns], 1.0, tl.float32), scale)
        if in_model_dtype:
            divided = tl.math.div_rn(exact, _widen(_round_like(scale, stored)))
            scaled = _widen(_round_like(divided, stored))
        elif by_reciprocal:
            scaled = exact * factor
        else:
            scaled = tl.math.div_rn(exact, scale)
        inside = tl.minimum(tl.maximum(scaled, -most, propagate_nan=_ALL), most, propagate_nan=_ALL)
        magnitude = _round_magnitudes(inside, smallest_normal, carry)
        sign = inside.to(tl.int32, bitcast=True) & _SIGN
        if has_one_zero:
            sign = tl.where(magnitude == 0, 0, sign)
        values = (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True) * scale
        tl.store(target + columns[None, :], _round_like(values, stored), mask=is_inside)

        error = (values - exact).to(tl.float64)
        if is_masked:
            is_inside = is_inside & (numbers >= 0)[:, None]
            exact = tl.where(is_inside, exact, 0.0)
            scaled = tl.where(is_inside, scaled, 0.0)
            codes = tl.where(is_inside, codes, 0)
        wide_exact = exact.to(tl.float64)
        signal += wide_exact * wide_exact
        noise += tl.where(is_inside, error * error, 0.0)
        clipped += (tl.abs(scaled) > limit).to(tl.int32)
        is_chosen = is_inside & (numbers % flush_stride == 0)[:, None]
        before += (is_chosen & (exact != 0)).to(tl.int32)
        after += (is_chosen & (values != 0)).to(tl.int32)
        tops = tl.maximum(tops, codes)

    number = (sequence * tl.num_programs(1) + head) * tl.num_programs(0) + tl.program_id(0)
    own = sums + number.to(tl.int64) * 6
    tl.store(own, tl.sum(signal))
    tl.store(own + 1, tl.sum(noise))
    tl.store(own + 2, tl.sum(clipped).to(tl.float64))
    tl.store(own + 3, tl.sum(before).to(tl.float64))
    tl.store(own + 4, tl.sum(after).to(tl.float64))
    tl.store(own + 5, tl.max(tops).to(tl.float32, bitcast=True).to(tl.float64))


@triton.jit(do_not_specialize=["length", "first_row"])  # type: ignore[untyped-decorator]
def _round_probabilities(  # type: ignore[no-untyped-def]  # noqa: PLR0915 -- one kernel
    scores,
    totals,
    scales,
    sinks,
    is_counted,
    sums,
    length,
    num_keys,
    first_row,
    tile,
    has_sinks: tl.constexpr,
    measures: tl.constexpr,
    is_tiled: tl.constexpr,
    most: tl.constexpr,
    smallest_normal: tl.constexpr,
    carry: tl.constexpr,
    num_rows: tl.constexpr,
    num_columns: tl.constexpr,
):
    head = tl.program_id(1)
    rows = tl.program_id(0) * num_rows + tl.arange(0, num_rows)
    place = scores + (head.to(tl.int64) * length + rows)[:, None] * num_keys
    num_tiles = tl.cdiv(num_keys, tile)
    scale = tl.zeros([num_rows, 1], tl.float32) + tl.load(scales)
    factor = tl.math.div_rn(tl.full([num_rows, 1], 1.0, tl.float32), scale)

    tops = tl.full([num_rows, num_columns], _LOWEST, tl.float32)
    for number in range(num_tiles):
        columns = number * tile + tl.arange(0, num_columns)
        is_key = (columns < (number + 1) * tile) & (columns < num_keys)
        is_inside = is_key[None, :] & (rows < length)[:, None]
        stored = tl.load(place + columns[None, :], mask=is_inside, other=-float("inf"))
        is_seen = columns[None, :] <= (rows + first_row)[:, None]
        tops = tl.where(is_seen, tl.maximum(tops, stored), tops)
    largest = tl.max(tops, 1)

    running = tl.full([num_rows], _LOWEST, tl.float32)
    total = tl.zeros([num_rows, num_columns], tl.float32)
    signal = tl.zeros([num_rows, num_columns], tl.float32)
    noise = tl.zeros([num_rows, num_columns], tl.float32)
    before = tl.zeros([num_rows, num_columns], tl.int32)
    after = tl.zeros([num_rows, num_columns], tl.int32)
    tops = tl.zeros([num_rows, num_columns], tl.float32)
    for done in range(num_tiles):
        number = num_tiles - 1 - done
        columns = number * tile + tl.arange(0, num_columns)
        is_key = (columns < (number + 1) * tile) & (columns < num_keys)
        is_inside = is_key[None, :] & (rows < length)[:, None]
        stored = tl.load(place + columns[None, :], mask=is_inside, other=-float("inf"))
        is_seen = columns[None, :] <= (rows + first_row)[:, None]
        stored = tl.where(is_seen, stored, -float("inf"))
        running = tl.maximum(running, tl.max(stored, 1)) if is_tiled else largest
        p = tl.exp(stored - running[:, None])
        correction = tl.exp(running - largest)[:, None]
        inside = tl.minimum(p * factor, most, propagate_nan=_ALL)
        values = _round_magnitudes(inside, smallest_normal, carry) * scale
        tl.store(place + columns[None, :], values * correction, mask=is_inside)
        total += p * correction
        if measures:
            error = values - p
            signal += p * p
            noise += error * error
            before += (p != 0).to(tl.int32)
            after += (values != 0).to(tl.int32)
            tops = tl.maximum(tops, p)

    summed = tl.sum(total, 1)
    if has_sinks:
        summed += tl.exp(tl.load(sinks + head).to(tl.float32) - largest)
    own = totals + head.to(tl.int64) * length + rows
    tl.store(own, tl.maximum(summed, _TINY), mask=rows < length)
    if measures:
        counts = (tl.load(is_counted + rows, mask=rows < length, other=0) != 0)[:, None]
        mine = sums + (head * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * 6
        tl.store(mine, tl.sum(tl.where(counts, signal, 0.0).to(tl.float64)))
        tl.store(mine + 1, tl.sum(tl.where(counts, noise, 0.0).to(tl.float64)))
        tl.store(mine + 2, 0.0)
        tl.store(mine + 3, tl.sum(tl.where(counts, before, 0)).to(tl.float64))
        tl.store(mine + 4, tl.sum(tl.where(counts, after, 0)).to(tl.float64))
        tl.store(mine + 5, tl.max(tl.where(counts, tops, 0.0)).to(tl.float64))
