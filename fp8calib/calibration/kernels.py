"""Reduce a tensor on a GPU in one kernel, which reads it once.

The results are those of torch's operations in `reductions`, bit for bit. Magnitudes are compared as
the codes of fp32, which order as integers, NaN above infinity. Importing this needs Triton, which
torch's builds for CUDA come with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from fp8calib.calibration.batch_view import HISTOGRAM_SEQUENCES, INPUT_HISTOGRAM_TOKENS, BatchView
from fp8calib.calibration.calibration_stats import SiteStats
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


def reduce_heads(batch: BatchView, x: torch.Tensor, num_heads: int, token_stride: int) -> SiteStats:
    """Reduce [B, H, S, D] by head, several of them as one if `num_heads` is smaller than H.

    With `num_heads` 0 the channels of one head are reduced apart. The histogram counts tokens by
    `token_stride`, a divisor of 8; 0 counts none.
    """
    x = x if x.stride(-1) == 1 else x.contiguous()
    _, heads, length, width = x.shape
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    num_blocks = triton.cdiv(width, columns)
    codes, histogram = _make_zeros(batch, x.device, {"amax": (num_heads or width,)})
    token_stride = token_stride if batch.sampled else 0  # without, it takes a quarter of registers
    launch(
        _reduce,
        (heads * num_blocks, triton.cdiv(length, _ROWS.value), batch.shape[0]),
        *(x, batch.lengths_on(x.device), bin_of_code(x.device)),
        *(codes["amax"], codes["positions"], codes["sequences"], histogram),
        *x.stride()[:3],
        *(width, num_blocks, heads // max(num_heads, 1), batch.first, HISTOGRAM_SEQUENCES),
        by_channel=not num_heads,
        token_stride=token_stride,
        num_columns=columns,
    )
    tensors = {name: each.view(torch.float32) for name, each in codes.items()}
    counted = {"histogram": histogram} if token_stride else {}
    return SiteStats(count=batch.num_tokens, **tensors, **counted)


def reduce_experts(
    batch: BatchView,
    rows: torch.Tensor,
    experts: torch.Tensor,
    order: torch.Tensor,
    num_routed: int,
    num_experts: int,
    block: int,
) -> SiteStats:
    """Reduce rows [N * K, C] sorted by expert, per channel and per expert.

    `experts` has the expert of each row, and `order` its place before rows were sorted, int64 both.
    A token goes to `num_routed` experts, and `block` channels of an expert share an amax.
    """
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    num_rows, width = rows.shape
    columns = min(triton.next_power_of_2(width), _MOST_COLUMNS)
    num_blocks = triton.cdiv(width, block)
    sizes = {"amax": (width,), "experts": (num_experts, num_blocks)}
    codes, histogram = _make_zeros(batch, rows.device, sizes)
    counts = batch.zeros(rows.device, 2 * num_experts).view(torch.int64)
    launch(
        _reduce_experts,
        (triton.cdiv(width, columns), triton.cdiv(num_rows, _ROWS.value)),
        *(rows, order, experts, batch.lengths_on(rows.device), bin_of_code(rows.device)),
        *(codes["amax"], codes["positions"], codes["sequences"], codes["experts"]),
        *(counts, histogram),
        *(rows.stride(0), num_rows, width, batch.shape[1], num_routed, block),
        *(num_blocks, batch.first, HISTOGRAM_SEQUENCES),
        token_stride=INPUT_HISTOGRAM_TOKENS if batch.sampled else 0,
        num_columns=columns,
    )
    tensors = {name: each.view(torch.float32) for name, each in codes.items()}
    counted = {"histogram": histogram} if batch.sampled else {}
    return SiteStats(count=batch.num_tokens, **tensors, expert_counts=counts, **counted)


def _make_zeros(
    batch: BatchView, device: torch.device, sizes: Mapping[str, tuple[int, ...]]
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Make what kernels raise: codes of magnitudes, int32 by name, and a histogram, int64."""
    sizes = {**sizes, "positions": (len(batch.spans),), "sequences": (batch.shape[0],)}
    codes = {name: batch.zeros(device, math.prod(size)).view(size) for name, size in sizes.items()}
    return codes, batch.zeros(device, 2 * NUM_BINS).view(torch.int64)


@triton.jit
def _find_codes(stored):  # type: ignore[no-untyped-def]
    """Give magnitudes as codes of fp32."""
    if stored.dtype == tl.bfloat16:  # the interpreter loses its subnormals otherwise
        codes = stored.to(tl.int16, bitcast=True).to(tl.int32) << 16
    else:
        codes = stored.to(tl.float32).to(tl.int32, bitcast=True)
    return codes & 0x7FFFFFFF


@triton.jit
def _count_bins(codes, is_chosen, bins):  # type: ignore[no-untyped-def]
    """Count the bins of codes: int32 [_NUM_COUNTED]."""
    upper = tl.maximum(tl.minimum((codes >> 16) - _BELOW, _NUM_CODES - 1), 0)
    found = tl.where(is_chosen, tl.load(bins + upper).to(tl.int32), _NUM_BINS)
    return tl.histogram(tl.reshape(found, [found.numel]), _NUM_COUNTED)


@triton.jit
def _add_bins(histogram, counts):  # type: ignore[no-untyped-def]
    index = tl.arange(0, _NUM_COUNTED)
    is_bin = (index < _NUM_BINS) & (counts > 0)
    tl.atomic_add(histogram + index, counts.to(tl.int64), mask=is_bin)


@triton.jit
def _raise_to(place, values, is_inside):  # type: ignore[no-untyped-def]
    """Raise what many rows share; most are below what is there, and need no atomic operation."""
    is_above = values > tl.load(place, mask=is_inside, other=0, cache_modifier=".cg")
    tl.atomic_max(place, values, mask=is_inside & is_above)


@triton.jit
def _find_range(position):  # type: ignore[no-untyped-def]
    """Give the range of a position, or of each."""
    reached = position * 0
    for octave in tl.static_range(_NUM_RANGES - 1):
        reached += (position >= (_FIRST_RANGE << octave)).to(tl.int32)
    return reached


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
        codes = _find_codes(stored)
        tops = tl.maximum(tops, codes)
        if token_stride == 1:  # noqa: SIM102 -- known to the compiler
            if is_sampled:
                counts += _count_bins(codes, is_inside, bins)
    if token_stride > 1:  # noqa: SIM102 -- known to the compiler
        if is_sampled:  # few rows, read again: counting costs more than reading
            for at in range(start, stop, _TILE_ROWS * token_stride):
                rows = at + tl.arange(0, _TILE_ROWS) * token_stride
                is_chosen = (rows < stop)[:, None] & is_column[None, :]
                offsets = rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
                stored = tl.load(place + offsets, mask=is_chosen, other=0.0)
                counts += _count_bins(_find_codes(stored), is_chosen, bins)

    largest = tl.max(tops, 0)
    of_all = tl.max(largest, 0)
    if by_channel:
        tl.atomic_max(amax + columns, largest, mask=is_column)
    else:
        tl.atomic_max(amax + head // num_copies, of_all)
    tl.atomic_max(positions + _find_range(start), of_all)
    tl.atomic_max(sequences + sequence, of_all)
    if token_stride:  # noqa: SIM102 -- known to the compiler
        if is_sampled:
            _add_bins(histogram, counts)


@triton.jit(do_not_specialize=["num_rows", "length", "num_routed", "num_blocks", "first"])  # type: ignore[untyped-decorator]
def _reduce_experts(  # type: ignore[no-untyped-def]
    x,
    order,
    experts,
    lengths,
    bins,
    amax,
    positions,
    sequences,
    by_expert,
    expert_counts,
    histogram,
    stride_row,
    num_rows,
    width,
    length,
    num_routed,
    block,
    num_blocks,
    first,
    sequence_stride,
    token_stride: tl.constexpr,
    num_columns: tl.constexpr,
):
    columns = tl.program_id(0) * num_columns + tl.arange(0, num_columns)
    is_column = columns < width
    blocks = columns // block
    tops = tl.zeros([_TILE_ROWS, num_columns], tl.int32)
    tops_of_one = tl.zeros([_TILE_ROWS, num_columns], tl.int32)
    counts = tl.zeros([_NUM_COUNTED], tl.int32)
    start = tl.program_id(1) * _ROWS
    stop = tl.minimum(start + _ROWS, num_rows)
    current = tl.load(experts + start)
    for at in range(start, stop, _TILE_ROWS):
        rows = at + tl.arange(0, _TILE_ROWS)
        is_row = rows < num_rows
        token = (tl.load(order + rows, mask=is_row, other=0) // num_routed).to(tl.int32)
        sequence, position = token // length, token % length
        is_row &= position < tl.load(lengths + sequence)
        is_inside = is_row[:, None] & is_column[None, :]
        offsets = rows.to(tl.int64)[:, None] * stride_row + columns[None, :]
        codes = _find_codes(tl.load(x + offsets, mask=is_inside, other=0.0))
        tops = tl.maximum(tops, codes)
        largest = tl.max(codes, 1)
        expert = tl.load(experts + rows, mask=is_row, other=0)
        # The rows are sorted: most tiles have one expert, that of the tile before.
        last = tl.load(experts + tl.minimum(at + _TILE_ROWS, stop) - 1)
        for number in range(tl.load(experts + at), last + 1):
            if number != current:
                own = by_expert + current * num_blocks + blocks
                tl.atomic_max(own, tl.max(tops_of_one, 0), mask=is_column)
                tops_of_one = tl.zeros([_TILE_ROWS, num_columns], tl.int32)
                current = number
            is_own = (expert == number)[:, None]
            tops_of_one = tl.where(is_own, tl.maximum(tops_of_one, codes), tops_of_one)
        _raise_to(positions + _find_range(position), largest, is_row)
        _raise_to(sequences + sequence, largest, is_row)
        if tl.program_id(0) == 0:
            tl.atomic_add(expert_counts + expert, is_row.to(tl.int64), mask=is_row)
        if token_stride:
            is_sampled = is_row & ((first + sequence) % sequence_stride == 0)
            is_sampled &= position % token_stride == 0
            counts += _count_bins(codes, is_inside & is_sampled[:, None], bins)
    own = by_expert + current * num_blocks + blocks
    tl.atomic_max(own, tl.max(tops_of_one, 0), mask=is_column)
    tl.atomic_max(amax + columns, tl.max(tops, 0), mask=is_column)
    if token_stride:
        _add_bins(histogram, counts)
