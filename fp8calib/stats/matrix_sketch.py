"""Sketches of matrices: a few numbers that tell how far two matrices are apart.

A sketch is r^T W c for 32 fixed pairs of vectors of random signs. The sketch of a difference is the
difference of the sketches, and the mean of its squares estimates the squared Frobenius norm
(Johnson and Lindenstrauss). So 64 bytes tell a matrix that was quantized from another matrix.
"""

from __future__ import annotations

import base64
import binascii
import math
from collections.abc import Iterator
from functools import cache, partial

import numpy as np
import torch

from fp8calib.checkpoint.checkpoint import Checkpoint

_SIZE = 32
_ELEMENTS_AT_ONCE = 2**18
_BLOCKS = 16
_SEED = 0


def sketch_matrix(
    checkpoint: Checkpoint, name: str, most_elements: int | None = None
) -> torch.Tensor:
    """Sketch a matrix of a checkpoint: fp64 [32], each within the precision of bfloat16.

    A matrix of more than `most_elements` is replaced by about so many: 16 blocks of rows, evenly
    spread. Of experts stored in one tensor, one is sketched, another in each layer.
    """
    return _sketch(checkpoint, name, most_elements)[0]


def measure_distance(
    recorded: torch.Tensor, checkpoint: Checkpoint, name: str, most_elements: int | None = None
) -> float:
    """Estimate how far a matrix is from a recorded one, divided by its own Frobenius norm.

    The estimate is within a quarter of the distance for rounding errors. Two matrices that have
    nothing in common have a distance of 1.4 or more. `most_elements` is that of `sketch_matrix`.
    """
    own, norm = _sketch(checkpoint, name, most_elements)
    distance = math.sqrt(float((own - recorded).square().mean()))
    if norm == 0:
        return math.inf if distance else 0.0
    return distance / norm


def encode_sketch(sketch: torch.Tensor) -> str:
    """Convert a sketch to text."""
    raw = sketch.to(torch.bfloat16).view(torch.int16).numpy().astype("<i2").tobytes()
    return base64.b64encode(raw).decode()


def decode_sketch(text: str) -> torch.Tensor:
    """Convert the text of a sketch back.

    Raises:
        ValueError: it is not a sketch.
    """
    try:
        raw = base64.b64decode(text.encode(), validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from error
    values = torch.from_numpy(np.frombuffer(raw, "<i2").astype(np.int16)).view(torch.bfloat16)
    if len(values) != _SIZE or not bool(values.isfinite().all()):
        raise ValueError(f"not {_SIZE} finite numbers")
    return values.double()


def _sketch(
    checkpoint: Checkpoint, name: str, most_elements: int | None
) -> tuple[torch.Tensor, float]:
    """Sketch a matrix, and compute its Frobenius norm."""
    *experts, rows, columns = checkpoint.tensors[name].shape
    read = partial(checkpoint.read_rows, name)
    if experts:
        index = find_layer(name) % max(experts[0], 1)
        (expert,) = read(index, index + 1)
        read = partial(_take_rows, expert)
    signs = _draw_signs(max(rows, columns))
    left, right = signs[:, 0, :rows], signs[:, 1, :columns]
    sums, squares = torch.zeros(_SIZE, columns, dtype=torch.float64), 0.0
    for start, stop in _list_blocks(rows, columns, most_elements):
        part = read(start, stop).double()
        sums += left[:, start:stop].double() @ part
        squares += float(part.square().sum())
    sketch = (sums * right.double()).sum(1)
    return sketch.to(torch.bfloat16).double(), math.sqrt(squares)


def find_layer(name: str) -> int:
    """Find the first number in the path of a tensor: that of its layer; 0 without one."""
    return next((int(part) for part in name.split(".") if part.isdecimal()), 0)


def _take_rows(matrix: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return matrix[start:stop]


def _list_blocks(rows: int, columns: int, most_elements: int | None) -> Iterator[tuple[int, int]]:
    """List the rows to read: all, or blocks of which the first and the last row are in one."""
    if most_elements is None or rows * columns <= most_elements:
        step = max(_ELEMENTS_AT_ONCE // max(columns, 1), 1)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)
        return
    size = max(most_elements // columns // _BLOCKS, 1)
    count = min(_BLOCKS, rows // size)
    for number in range(count):
        start = (rows - size) * number // max(count - 1, 1)
        yield start, start + size


@cache
def _draw_signs(count: int) -> torch.Tensor:
    """Draw signs: int8 [32, 2, count]. NumPy guarantees the stream of a bit generator."""
    words = np.random.PCG64(_SEED).random_raw(count).astype("<u8")
    bits = np.unpackbits(words.view(np.uint8).reshape(count, 8), axis=1).T
    return torch.from_numpy(bits.astype(np.int8) * 2 - 1).reshape(_SIZE, 2, count)
