"""Reduce a tensor on a GPU in one kernel, which reads it once.

The results are those of torch's operations in `reductions`, bit for bit. Magnitudes are compared as
the codes of fp32, which order as integers, NaN above infinity. Importing this needs Triton, which
torch's builds for CUDA come with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fp8calib.numerics.histogram import LOWEST_CODE, NUM_BINS, NUM_CODES, bin_of_code
from fp8calib.numerics.positions import FIRST_RANGE, NUM_RANGES

_ROWS = tl.constexpr(128)
"""Rows of a program: a divisor of `FIRST_RANGE`, so that all are in one range of positions."""
_TILE_ROWS = tl.constexpr(16)
_MOST_COLUMNS = 128
_FIRST_RANGE, _NUM_RANGES = tl.constexpr(FIRST_RANGE), tl.constexpr(NUM_RANGES)
_BELOW, _NUM_CODES = tl.constexpr(LOWEST_CODE - 1), tl.constexpr(NUM_CODES)
_NUM_BINS = tl.constexpr(NUM_BINS)
_NUM_COUNTED = tl.constexpr(triton.next_power_of_2(NUM_BINS + 1))
"""The bins of a histogram, and behind them what is not counted."""


def launch(
    kernel: Any, grid: Sequence[int], x: torch.Tensor, *arguments: Any, **constants: Any
) -> None:
    """Launch a kernel on the device of `x`; all kernels are launched here."""
    with torch.cuda.device_of(x):  # type: ignore[no-untyped-call]  # else on the current device
        kernel[tuple(grid)](x, *arguments, **constants)


def reduce_heads(
    x: torch.Tensor,
    num_heads: int,
    lengths: torch.Tensor,
    *,
    amax: torch.Tensor,
    positions: torch.Tensor,
    sequences: torch.Tensor,
    histogram: torch.Tensor,
    first: int,
    sequence_stride: int,
    token_stride: int,
) -> None:
    """Reduce [B, H, S, D] by head, several of them as one if `num_heads` is smaller than H.

    Args:
        x: the tensor; with `num_heads` 0, one head whose channels are reduced apart.
        num_heads: the length of `amax`; 0: its length is D.
        lengths: the tokens that count of each sequence, int32 [B].
        amax: int32, filled with zeros as all results are: the codes of the largest magnitudes.
        positions: by range of positions, int32, as many as S reaches.
        sequences: int32 [B].
        histogram: int64 [NUM_BINS].
        first: the global index of the first sequence.
        sequence_stride: the stride of the sequences that the histogram counts.
        token_stride: the stride of their tokens; 0 counts none.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, heads, length, width = x.shape
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    num_blocks = triton.cdiv(width, columns)
    launch(
        _reduce,
        (heads * num_blocks, triton.cdiv(length, _ROWS.value), batch),
        *(x, lengths, bin_of_code(x.device), amax, positions, sequences, histogram),
        *x.stride()[:3],
        *(width, num_blocks, heads // max(num_heads, 1), first, sequence_stride),
        by_channel=not num_heads,
        token_stride=token_stride,
        num_columns=columns,
    )


@triton.jit(do_not_specialize=["num_blocks", "num_copies", "first", "sequence_stride"])  # type: ignore[untyped-decorator]
def _reduce(  # type: ignore[no-untyped-def]
    x,
    lengths,
    bins,
    amax,
    positions,
    sequences,
    histogram,
    stride_batch,
    stride_head,
    stride_row,
    width,
    num_blocks,
    num_copies,
    first,
    sequence_stride,
    by_channel: tl.constexpr,
    token_stride: tl.constexpr,
    num_columns: tl.constexpr,
):
    head, sequence = tl.program_id(0) // num_blocks, tl.program_id(2)
    columns = (tl.program_id(0) % num_blocks) * num_columns + tl.arange(0, num_columns)
    is_column = columns < width
    start = tl.program_id(1) * _ROWS
    stop = tl.minimum(start + _ROWS, tl.load(lengths + sequence))
    place = x + sequence.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head
    is_sampled = (first + sequence) % sequence_stride == 0

    tops = tl.zeros([_TILE_ROWS, num_columns], tl.int32)
    counts = tl.zeros([_NUM_COUNTED], tl.int32)
    for at in range(start, stop, _TILE_ROWS):
        rows = at + tl.arange(0, _TILE_ROWS)
        is_inside = (rows < stop)[:, None] & is_column[None, :]
        offsets = rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
        stored = tl.load(place + offsets, mask=is_inside, other=0.0)
        if stored.dtype == tl.bfloat16:  # the interpreter loses its subnormals otherwise
            codes = stored.to(tl.int16, bitcast=True).to(tl.int32) << 16
        else:
            codes = stored.to(tl.float32).to(tl.int32, bitcast=True)
        codes &= 0x7FFFFFFF
        tops = tl.maximum(tops, codes)
        if token_stride:  # noqa: SIM102 -- known to the compiler
            if is_sampled:
                upper = tl.maximum(tl.minimum((codes >> 16) - _BELOW, _NUM_CODES - 1), 0)
                found = tl.load(bins + upper).to(tl.int32)
                is_counted = is_inside & (rows % token_stride == 0)[:, None]
                found = tl.where(is_counted, found, _NUM_BINS)
                counts += tl.histogram(tl.reshape(found, [_TILE_ROWS * num_columns]), _NUM_COUNTED)

    largest = tl.max(tops, 0)
    of_all = tl.max(largest, 0)
    if by_channel:
        tl.atomic_max(amax + columns, largest, mask=is_column)
    else:
        tl.atomic_max(amax + head // num_copies, of_all)
    reached = 0
    for octave in tl.static_range(_NUM_RANGES - 1):
        reached += (start >= (_FIRST_RANGE << octave)).to(tl.int32)
    tl.atomic_max(positions + reached, of_all)
    tl.atomic_max(sequences + sequence, of_all)
    if token_stride:  # noqa: SIM102 -- known to the compiler
        if is_sampled:
            index = tl.arange(0, _NUM_COUNTED)
            is_bin = (index < _NUM_BINS) & (counts > 0)
            tl.atomic_add(histogram + index, counts.to(tl.int64), mask=is_bin)
