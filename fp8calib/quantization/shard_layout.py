"""Lay out an output file, with the offset of each tensor, before any weight is read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch

from fp8calib.checkpoint.header import ITEM_SIZE_BYTES, encode_header
from fp8calib.numerics.schemes import Scheme
from fp8calib.quantization.matrices import Matrix


@dataclass(frozen=True, slots=True)
class Codes:
    """The FP8 codes of a weight, and the tensor that holds its scale."""

    matrix: Matrix
    scheme: Scheme
    scale: OutputTensor


Content = str | Matrix | Codes | torch.Tensor
"""A tensor of the source that is copied, by name; an unquantized matrix [out, in] that is cut out
of a stack; the codes of a quantized one; or a number: a scale of an input, of K or of V."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputTensor:
    """One tensor of an output file."""

    name: str
    dtype: str
    """The dtype, as safetensors spells it."""
    shape: tuple[int, ...]
    content: Content | None = None
    """The source of its data; None for a scale of `Codes`, or if the writer does not need it."""

    @property
    def size_bytes(self) -> int:
        """Count the bytes of its data."""
        return ITEM_SIZE_BYTES[self.dtype] * math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardLayout:
    """An output file: its header, and where the data of its tensors begin."""

    name: str
    head: bytes
    """Everything before the data of the first tensor."""
    tensors: tuple[OutputTensor, ...]
    """The tensors, in the order of their data."""
    starts: Mapping[str, int]
    """Offset in the file, by the tensor's name."""

    @property
    def data_bytes(self) -> int:
        """Sum the bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        """Count the bytes of the file."""
        return len(self.head) + self.data_bytes


def lay_out(
    name: str, tensors: Collection[OutputTensor], *, metadata: Mapping[str, str]
) -> ShardLayout:
    """Lay out tensors one after another, those with wider numbers first, so that all are aligned.

    Those of equal width keep their order; `metadata` is written beside `format`.
    """
    ordered = sorted(tensors, key=lambda tensor: -ITEM_SIZE_BYTES[tensor.dtype])
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offsets = [0, *accumulate(tensor.size_bytes for tensor in ordered)]
    for tensor, span in zip(ordered, pairwise(offsets), strict=True):
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": list(span),
        }
    head = encode_header(header)
    return ShardLayout(
        name=name,
        head=head,
        tensors=tuple(ordered),
        starts={t.name: len(head) + start for t, start in zip(ordered, offsets, strict=False)},
    )
