"""Decode INT4 and INT8 weights of compressed-tensors.

A weight is `X.weight_packed` (integers in words of an int32, the first in the lowest bits, each
plus half of their range) with `X.weight_shape`, or int8 `X.weight`. Its scale `X.weight_scale` is
one number, or one for each row, or for each row and group of columns. Zero points have the shape of
the scale: int8, or packed too, along the rows. Formats and layout follow compressed-tensors
0.20 (`compressors/pack_quantized`, `naive_quantized`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import FLOATS, TensorEntry
from fp8calib.errors import ModelError, shorten

_PACKED = ".weight_packed"
_BITS = (4, 8)
_HINT = "download the checkpoint again, or name the unquantized model"


@dataclass(frozen=True, slots=True, kw_only=True)
class IntegerWeight:
    """The stored integers of a weight [out, in], their scales and zero points."""

    stored: str
    shape: tuple[int, int]
    scale: str
    zero_point: str | None
    bits: int

    @property
    def form(self) -> str:
        """The name of the format."""
        return f"INT{self.bits}"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all tensors it is stored as."""
        shape = f"{_module(self.stored)}.weight_shape"
        return (self.stored, self.scale, shape, *([self.zero_point] if self.zero_point else ()))

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Decode rows: fp32.

        Raises:
            ModelError: a scale is not valid, or a file cannot be read.
        """
        codes = checkpoint.read_rows(self.stored, start, stop)
        if self.stored.endswith(_PACKED):
            codes = unpack(codes, self.shape[1], self.bits)
        scale = checkpoint.read(self.scale).to(torch.float32)
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise _refusal(checkpoint, f"{shorten(self.scale)} holds what is not a scale")
        values = codes.to(torch.float32)
        if self.zero_point is not None:
            points = checkpoint.read(self.zero_point)
            if points.dtype is torch.int32:
                points = unpack(points.T, scale.shape[0], self.bits).T
            values -= self._spread(points.to(torch.float32), start, stop)
        return values * self._spread(scale, start, stop)

    def _spread(self, values: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Repeat the values of groups over the columns of some rows."""
        if values.numel() == 1:
            return values.reshape(())
        return values[start:stop].repeat_interleave(self.shape[1] // values.shape[1], 1)


def find_integers(checkpoint: Checkpoint) -> Iterator[tuple[str, IntegerWeight]]:
    """Find the weights of integers in a checkpoint, by the name of the weight.

    Raises:
        ModelError: shapes do not fit, or a tensor is missing.
    """
    for stored, entry in checkpoint.tensors.items():
        module = _module(stored)
        if stored.endswith(_PACKED) and entry.dtype == "I32":
            shape = _read_shape(checkpoint, f"{module}.weight_shape")
            bits = next((each for each in _BITS if _is_packed(entry, shape, each)), 0)
        elif stored.endswith(".weight") and entry.dtype == "I8" and len(entry.shape) == 2:
            shape, bits = (entry.shape[0], entry.shape[1]), 8
        else:
            continue
        if not bits:
            raise _refusal(
                checkpoint,
                f"{shorten(stored)} is {entry.dtype} {list(entry.shape)}, and its weight "
                f"{list(shape)}: not integers of 4 or 8 bits",
            )
        scale, point = f"{module}.weight_scale", f"{module}.weight_zero_point"
        _check_scale(checkpoint, scale, shape)
        has_point = point in checkpoint.tensors
        if has_point:
            _check_zero_point(checkpoint, point, checkpoint.tensors[scale].shape, bits)
        weight = IntegerWeight(
            stored=stored,
            shape=shape,
            scale=scale,
            zero_point=point if has_point else None,
            bits=bits,
        )
        yield f"{module}.weight", weight


def _read_shape(checkpoint: Checkpoint, name: str) -> tuple[int, int]:
    if name not in checkpoint.tensors:
        raise _refusal(checkpoint, f"there is no {shorten(name)}")
    sizes = checkpoint.read(name).flatten().tolist()
    if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
        raise _refusal(checkpoint, f"{shorten(name)} is not the two sizes of a weight")
    return sizes[0], sizes[1]


def _check_scale(checkpoint: Checkpoint, name: str, shape: tuple[int, int]) -> None:
    entry = checkpoint.tensors.get(name)
    if entry is None or entry.dtype not in FLOATS:
        raise _refusal(checkpoint, f"{shorten(name)} is missing, or is not a float")
    rows, columns = shape
    is_one = prod(entry.shape) == 1
    is_grid = len(entry.shape) == 2 and entry.shape[0] == rows and entry.shape[1] > 0
    if not is_one and not (is_grid and columns % entry.shape[1] == 0):
        raise _refusal(
            checkpoint, f"{shorten(name)} has shape {list(entry.shape)} for a weight {list(shape)}"
        )


def _check_zero_point(checkpoint: Checkpoint, name: str, scale: tuple[int, ...], bits: int) -> None:
    entry = checkpoint.tensors[name]
    packed = (-(-scale[0] // (32 // bits)), *scale[1:]) if len(scale) == 2 else None
    if (entry.dtype, entry.shape) not in (("I8", scale), ("I32", packed)):
        raise _refusal(
            checkpoint,
            f"{shorten(name)} is {entry.dtype} {list(entry.shape)} for scales {list(scale)}",
        )


def _is_packed(entry: TensorEntry, shape: tuple[int, int], bits: int) -> bool:
    return entry.shape == (shape[0], -(-shape[1] // (32 // bits)))


def unpack(words: torch.Tensor, num_columns: int, bits: int) -> torch.Tensor:
    """Unpack int32 words of 4- or 8-bit integers, the first in the lowest bits.

    Args:
        words: int32 [R, words of a row], each number plus half of its range.
        num_columns: numbers per row; the rest of the last word is padding.
        bits: bits of a number.

    Returns:
        int16 [R, num_columns]; of 4 bits from -8 to 7.
    """
    octets = words.contiguous().view(torch.uint8)
    if bits == 4:
        octets = torch.stack((octets & 15, octets >> 4), dim=-1)
    numbers = octets.reshape(len(words), -1)[:, :num_columns]
    return numbers.to(torch.int16) - (1 << (bits - 1))


def _refusal(checkpoint: Checkpoint, fault: str) -> ModelError:
    return ModelError(f"{checkpoint.folder}: {fault}", hint=_HINT)


def _module(name: str) -> str:
    return name.rpartition(".")[0]
