"""Write one output file in place by several threads, reading the source once or twice."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import Any, Protocol

import torch

from fp8calib.checkpoint.header import FLOATS
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, nonfinite_tensor_error
from fp8calib.numerics.encode import encode_blocks, encode_exponents, encode_rows
from fp8calib.numerics.schemes import Granularity, Scheme, count_parts
from fp8calib.quantization.all_zero import AllZeroWeight
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.shard_layout import Codes, OutputTensor, ShardLayout
from fp8calib.quantization.weights import (
    CHUNK_BYTES,
    WeightReader,
    WeightScales,
    part_amax,
    require_finite,
    scale_parts,
    split_rows,
)

_TASKS_AHEAD = 64
"""Chunks that may wait for a thread; a chunk is read only when a thread takes it."""


@dataclass(slots=True)
class _Started:
    """A tensor whose chunks are being read and written."""

    tasks: Sequence[Future[None]]
    size_bytes: int
    finish: Callable[[], None] = lambda: None
    """Called when all chunks are written."""


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
        started: deque[_Started] = deque()
        try:
            os.truncate(self._file, self._shard.size_bytes)
            self._put(0, self._shard.head)
            for tensor in self._shard.tensors:
                started.append(self._start(tensor))
                while len(started) > 1 and sum(len(each.tasks) for each in started) > _TASKS_AHEAD:
                    _finish(started[0], advance)
                    started.popleft()
            for item in started:
                _finish(item, advance)
            os.fsync(self._file)  # a shard is recorded as finished when it is on the disk
        finally:  # cancel and wait for all chunks: the file is about to be closed
            tasks = [task for item in started for task in item.tasks]
            for task in tasks:
                task.cancel()
            wait(tasks)
            os.close(self._file)
        return self._all_zero

    def _start(self, tensor: OutputTensor) -> _Started:
        content = tensor.content
        if isinstance(content, Codes):
            return self._start_codes(tensor, content)
        if isinstance(content, Matrix):
            return self._start_rows(tensor, split_rows(content), content)
        if isinstance(content, str) and self._reader.checkpoint.form_of(content):
            # a part of a row costs the whole row
            num_rows = tensor.shape[0]
            step = max(1, CHUNK_BYTES * num_rows // tensor.size_bytes)
            chunks = (range(row, min(row + step, num_rows)) for row in range(0, num_rows, step))
            return self._start_rows(tensor, chunks)
        if isinstance(content, str):
            return self._start_copy(tensor)
        if content is not None:
            self._put_scale(tensor, content)
        return _Started((), 0)

    def _submit(self, write: Callable[[Any], None], parts: Iterable[Any]) -> list[Future[None]]:
        return [self._reader.pool.submit(write, part) for part in parts]

    def _start_copy(self, tensor: OutputTensor) -> _Started:
        def copy(offset: int) -> None:
            stop = min(offset + CHUNK_BYTES, tensor.size_bytes)
            span = self._reader.checkpoint.read_bytes(tensor.name, offset, stop)
            if len(tensor.shape) == 1 and tensor.dtype in FLOATS:
                _require_numbers(tensor, span.view(TORCH_DTYPES[tensor.dtype]), offset)
            self._put(self._shard.starts[tensor.name] + offset, span.numpy().data)

        tasks = self._submit(copy, range(0, tensor.size_bytes, CHUNK_BYTES))
        return _Started(tasks, tensor.size_bytes)

    def _start_rows(
        self, tensor: OutputTensor, chunks: Iterable[range], matrix: Matrix | None = None
    ) -> _Started:
        """Start a tensor that the source decodes, or a matrix of a stack."""

        def copy(rows: range) -> None:
            if matrix is None:
                values = self._reader.checkpoint.read_rows(tensor.name, rows.start, rows.stop)
            else:
                values = self._reader.read(matrix, rows)
            self._put_rows(tensor, rows, values.to(TORCH_DTYPES[tensor.dtype]))

        return _Started(self._submit(copy, chunks), tensor.size_bytes)

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
                self._put_rows(tensor, rows, rounded.read(matrix, rows))
            else:
                self._put_rows(tensor, rows, _encode(values, scale, scheme))

        def finish() -> None:
            scale, all_zero = whole or self._scales.of_parts(matrix, scheme, found)
            self._all_zero += filter(None, [all_zero])
            stored = scale if rounded is None else rounded.read_scales(matrix)
            self._put_scale(content.scale, stored)

        tasks = self._submit(quantize, split_rows(matrix, step))
        return _Started(tasks, tensor.size_bytes, finish)

    def _put_rows(self, tensor: OutputTensor, rows: range, values: torch.Tensor) -> None:
        row_bytes = tensor.size_bytes // tensor.shape[0]
        start = self._shard.starts[tensor.name] + rows.start * row_bytes
        self._put(start, values.contiguous().view(torch.uint8).cpu().numpy().data)

    def _put_scale(self, tensor: OutputTensor, scale: torch.Tensor) -> None:
        self._put(self._shard.starts[tensor.name], encode_scale(tensor, scale))

    def _put(self, offset: int, data: bytes | memoryview) -> None:
        """Write all bytes at an offset of the file."""
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written


def _encode(values: torch.Tensor, scale: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Encode rows of a weight with its scale, or with those of these rows or their blocks."""
    if scheme.weights is Granularity.BLOCK:
        return encode_blocks(values, scale, scheme.block)
    return encode_rows(values, scale.reshape(-1, 1))


def encode_scale(tensor: OutputTensor, scale: torch.Tensor) -> bytes:
    """Give the data of a scale in the dtype of its tensor: fp32, or exponents."""
    stored = encode_exponents(scale) if tensor.dtype == "U8" else scale.to(torch.float32)
    return stored.contiguous().numpy().tobytes()


def _require_numbers(tensor: OutputTensor, values: torch.Tensor, offset: int) -> None:
    """Refuse a norm or a bias that holds NaN; infinity is allowed, because it can be a mask."""
    if bool((found := values.isnan()).any()):
        index = offset // values.element_size() + int(found.nonzero()[0])
        raise nonfinite_tensor_error(tensor.name, nan, [index])


def _finish(started: _Started, advance: Callable[[int], None]) -> None:
    for task in started.tasks:
        task.result()
    started.finish()
    advance(started.size_bytes)
