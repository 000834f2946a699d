"""Write one output file in place by several threads, reading the source once or twice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from math import isnan, nan
from pathlib import Path
from typing import Protocol

import torch

from fp8calib.checkpoint.header import FLOATS
from fp8calib.checkpoint.tensor_file import nonfinite_tensor_error
from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.numerics.encode import encode_blocks, encode_exponents, encode_rows
from fp8calib.numerics.schemes import Granularity, count_parts
from fp8calib.quantization.matrices import AllZeroWeight, Matrix
from fp8calib.quantization.shard_layout import Codes, OutputTensor, ShardLayout
from fp8calib.quantization.weights import (
    CHUNK_BYTES,
    WeightReader,
    WeightScales,
    part_amax,
    require_finite,
    scale_parts,
    split,
    split_rows,
)

_TASKS_AHEAD = 64
"""Chunks that may wait for a thread; a chunk is read only when a thread takes it."""


_Started = tuple[list[Future[None]], Callable[[], None]]
"""The chunks of a tensor that are being read and written, and what is called when they are."""


class WeightCodes(Protocol):
    """Codes that are written as they are, instead of weights rounded to nearest."""

    def __contains__(self, matrix: Matrix) -> bool: ...

    def read(self, matrix: Matrix, rows: range) -> torch.Tensor:
        """Read the codes of consecutive rows: float8_e4m3fn."""

    def read_scales(self, matrix: Matrix) -> torch.Tensor:
        """Read the scales of a weight: fp32 [], or one per row or block."""


class ShardWriter:
    """Writes one output file.

    Tensors are started in the order of the source's data, so that disks read and write forward.
    Weights without `rounded` codes are rounded to nearest.
    """

    def __init__(
        self,
        shard: ShardLayout,
        reader: WeightReader,
        scales: WeightScales,
        rounded: WeightCodes | None = None,
    ) -> None:
        self._shard = shard
        self._reader = reader
        self._scales = scales
        self._rounded = rounded
        self._all_zero: list[AllZeroWeight] = []

    def write(self, path: Path, advance: Callable[[int], None]) -> list[AllZeroWeight]:
        """Write the file, and list the weights that are all zeros, whole or in part.

        `advance` is called with the number of bytes that were written.
        """
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        started: deque[tuple[OutputTensor, _Started]] = deque()

        def finish_first() -> None:
            tensor, (tasks, finish) = started[0]
            for task in tasks:
                task.result()
            finish()
            advance(tensor.size_bytes)
            started.popleft()

        try:
            os.truncate(self._file, self._shard.size_bytes)
            self._put(0, self._shard.head)
            for tensor in self._shard.tensors:
                started.append((tensor, self._start(tensor)))
                while len(started) > 1 and sum(len(s[0]) for _, s in started) > _TASKS_AHEAD:
                    finish_first()
            while started:
                finish_first()
            os.fsync(self._file)  # a shard is recorded as finished when it is on the disk
        finally:  # cancel and wait for all chunks: the file is about to be closed
            tasks = [task for _, (parts, _) in started for task in parts]
            for task in tasks:
                task.cancel()
            wait(tasks)
            os.close(self._file)
        return self._all_zero

    def _start(self, tensor: OutputTensor) -> _Started:
        content, checkpoint = tensor.content, self._reader.checkpoint
        if isinstance(content, Codes):
            return self._start_codes(tensor, content)
        if isinstance(content, torch.Tensor):
            self._put(self._shard.starts[tensor.name], encode_scale(tensor, content))
        chunks: Iterable[range] = ()
        write = partial(self._copy_bytes, tensor)
        if isinstance(content, Matrix):
            chunks = split_rows(content)
            write = partial(self._copy_rows, tensor, content)
        elif isinstance(content, str):
            step = CHUNK_BYTES
            if checkpoint.form_of(content):  # a part of a row costs the whole row
                row_bytes = tensor.size_bytes // tensor.shape[0]
                step = max(1, step // row_bytes) * row_bytes
            chunks = split(tensor.size_bytes, step)
        return [self._reader.pool.submit(write, chunk) for chunk in chunks], lambda: None

    def _copy_bytes(self, tensor: OutputTensor, span: range) -> None:
        data = self._reader.checkpoint.read_bytes(tensor.name, span.start, span.stop)
        if tensor.dtype in FLOATS:
            # infinity is allowed, because it can be a mask
            values = data.view(TORCH_DTYPES[tensor.dtype])
            # faster than isnan, and NaN where there is one
            if values.numel() and isnan(values.amax()):
                first = span.start // values.element_size() + int(values.isnan().nonzero()[0])
                index = torch.unravel_index(torch.tensor(first), tensor.shape)
                raise nonfinite_tensor_error(tensor.name, nan, [int(each) for each in index])
        self._put(self._shard.starts[tensor.name] + span.start, data.numpy().data)

    def _copy_rows(self, tensor: OutputTensor, matrix: Matrix, rows: range) -> None:
        values = self._reader.read(matrix, rows)
        if isnan(largest := values.amax()):
            require_finite(largest, matrix, rows, values)
        self._put_rows(tensor, rows, values)

    def _start_codes(self, tensor: OutputTensor, content: Codes) -> _Started:
        """Start a weight; one with a scale per row or block needs only one reading."""
        matrix, scheme = content.matrix, content.scheme
        rounded = self._rounded if self._rounded and matrix in self._rounded else None
        is_whole = scheme.weights is Granularity.TENSOR
        whole = self._scales.of_group(matrix, scheme) if is_whole else None
        step = scheme.block[0] if scheme.weights is Granularity.BLOCK else 1
        # Results of threads would settle between their buffers, whose memory could not be used
        # again: 50 MB for a large weight.
        found = torch.empty(count_parts(matrix.shape, scheme), device="cpu")

        def quantize(rows: range) -> None:
            values = self._reader.read(matrix, rows)
            if whole is not None:
                scale = whole[0].to(values.device)
            else:
                amax = part_amax(values, scheme)
                require_finite(amax, matrix, rows, values)
                first = rows.start // step
                found[first : first + len(amax)] = amax
                scale = scale_parts(amax, scheme)
            if rounded is not None:
                codes = rounded.read(matrix, rows)
            elif scheme.weights is Granularity.BLOCK:
                codes = encode_blocks(values, scale, scheme.block)
            else:
                codes = encode_rows(values, scale.reshape(-1, 1))
            self._put_rows(tensor, rows, codes)

        def finish() -> None:
            scale, all_zero = whole or self._scales.of_parts(matrix, scheme, found)
            self._all_zero += filter(None, [all_zero])
            stored = scale if rounded is None else rounded.read_scales(matrix)
            start = self._shard.starts[content.scale.name]
            self._put(start, encode_scale(content.scale, stored))

        submit = self._reader.pool.submit
        return [submit(quantize, rows) for rows in split_rows(matrix, step)], finish

    def _put_rows(self, tensor: OutputTensor, rows: range, values: torch.Tensor) -> None:
        row_bytes = tensor.size_bytes // tensor.shape[0]
        start = self._shard.starts[tensor.name] + rows.start * row_bytes
        self._put(start, values.contiguous().view(torch.uint8).cpu().numpy().data)

    def _put(self, offset: int, data: bytes | memoryview) -> None:
        """Write all bytes at an offset of the file."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written


def encode_scale(tensor: OutputTensor, scale: torch.Tensor) -> bytes:
    """Give the data of a scale in the dtype of its tensor: fp32, or exponents."""
    stored = encode_exponents(scale) if tensor.dtype == "U8" else scale.to(torch.float32)
    return stored.contiguous().numpy().tobytes()
