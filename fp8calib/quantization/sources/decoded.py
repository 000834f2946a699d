"""Read a checkpoint that is quantized already as the model that it holds: codes times scales.

`calibrate` and `verify` run such a model where no unquantized one is published. Weights are decoded
one at a time, and rounded to the dtype that config.json names.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES, TensorEntry
from fp8calib.checkpoint.model_config import without_quantization
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, TensorFile
from fp8calib.checkpoint.weight_index import WeightIndex
from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.dialects.fp8.weights import is_companion
from fp8calib.dialects.graft import QuantizedModel, find_quantized
from fp8calib.errors import ModelError, shorten
from fp8calib.quantization.sources.already_quantized import describe_weights
from fp8calib.quantization.sources.dequantized import find_dtype
from fp8calib.quantization.sources.fp4 import find_fp4
from fp8calib.quantization.sources.integers import find_integers

_FLOATS = frozenset({"BF16", "F16", "F32"})
_READ = (
    "calibrate and verify read FP8 checkpoints, INT4 and INT8 weights of compressed-tensors, "
    "NVFP4 of compressed-tensors and ModelOpt, and MXFP4 of compressed-tensors and gpt_oss"
)


class StoredWeight(Protocol):
    """A quantized weight, as it is stored."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the decoded weight."""

    @property
    def form(self) -> str:
        """The name of the format."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of all tensors it is stored as."""

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        """Decode rows of the first axis: fp32."""


def open_model(folder: Path, *, if_quantized: str) -> Checkpoint:
    """Open the checkpoint of a model to run; a quantized one is decoded while it is read.

    Args:
        folder: the checkpoint.
        if_quantized: what to do instead, in the error for one that cannot be decoded.

    Raises:
        ModelError: it cannot be read, or it is quantized in a form that cannot be decoded.
    """
    checkpoint = Checkpoint.open(folder, require_config=True)
    quantized = find_quantized(checkpoint)
    if quantized is None:
        return checkpoint
    checkpoint.close()
    decoded = DecodedCheckpoint.open(folder)
    if decoded.form:
        return decoded
    facts = describe_weights(quantized.config)
    raise ModelError(
        f"{folder} is already quantized (quant_method {quantized.method})"
        + (f", with {facts}" if facts else ""),
        hint=f"{if_quantized}; {_READ}",
    )


class DecodedCheckpoint(Checkpoint):
    """A quantized checkpoint whose weights are read in the dtype that config.json names.

    Its weights may have several forms. `form` is empty where none of them can be decoded.
    """

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        self._stored = Checkpoint(folder, files=files, index=index)
        quantized = find_quantized(self._stored)
        assert quantized is not None  # noqa: S101 -- open_model opens no other
        self._weights: dict[str, StoredWeight] = dict(_find_weights(self._stored, quantized))
        parts = {part for weight in self._weights.values() for part in weight.parts}
        self._fp8 = _open_fp8(self._stored, files, parts)
        if self._fp8 is not None:
            for name in sorted(self._fp8.quantized):
                self._weights[name] = _Fp8Weight(self._fp8, name)
        if not self._weights:
            return
        forms = " and ".join(sorted({weight.form for weight in self._weights.values()}))
        method = quantized.method if self._fp8 is None else self._fp8.dialect.name
        self.form = f"{forms} weights ({method})"
        self._dtype = find_dtype(super().load_config())
        size = ITEM_SIZE_BYTES[self._dtype]
        entries = dict(self._list_others(parts))
        entries |= {
            name: TensorEntry(self._dtype, weight.shape, 0, prod(weight.shape) * size)
            for name, weight in self._weights.items()
        }
        self.tensors = MappingProxyType(entries)

    def _list_others(self, parts: Collection[str]) -> Iterator[tuple[str, TensorEntry]]:
        """List the tensors of the model that are not quantized.

        Raises:
            ModelError: one of them is quantized in a form that is not read.
        """
        for name, entry in self.tensors.items():
            leaf = name.rpartition(".")[2]
            if name in parts or name in self._weights or is_companion(name):
                continue
            if leaf == "weight_g_idx":
                fault = f"{shorten(name)}: groups of reordered columns are not read"
            elif entry.dtype not in _FLOATS and leaf.startswith("weight"):
                fault = f"{shorten(name)} is stored in {entry.dtype}, beside {self.form}"
            else:
                yield name, entry
                continue
            raise ModelError(
                f"{self.folder}: {fault}", hint=f"{_READ}; or name the unquantized model"
            )

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it is on disk, with its codes and scales."""
        return self._stored

    def load_config(self) -> dict[str, object]:
        """Load `config.json` without the sections on quantization."""
        return without_quantization(super().load_config())

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor, in the dtype of `tensors`."""
        weight = self._weights.get(name)
        return super().read(name) if weight is None else self.read_rows(name, 0, weight.shape[0])

    def read_as_mapped(self, name: str) -> torch.Tensor:
        """Read a whole tensor; a decoded one is nowhere in a file."""
        return self.read(name) if name in self._weights else super().read_as_mapped(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of the first axis, in the dtype of `tensors`."""
        weight = self._weights.get(name)
        if weight is None:
            return super().read_rows(name, start, stop)
        return weight.read(self._stored, start, stop).to(TORCH_DTYPES[self._dtype])

    def read_block(self, name: str, index: int, rows: range, columns: range) -> torch.Tensor:
        """Read a part of one matrix of a 3-D tensor."""
        if name not in self._weights:
            return super().read_block(name, index, rows, columns)
        matrix = self.read_rows(name, index, index + 1)[0]
        return matrix[rows.start : rows.stop, columns.start : columns.stop]

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes of a tensor's data in the dtype of `tensors`."""
        if name not in self._weights:
            return super().read_bytes(name, start, stop)
        entry = self.tensors[name]
        row_bytes = entry.size_bytes // entry.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        data = self.read_rows(name, first, last).contiguous().view(torch.uint8).reshape(-1)
        return data[start - first * row_bytes : stop - first * row_bytes]

    def sample_bytes(self, name: str, size_bytes: int) -> bytes:
        """Read bytes from the middle of a tensor."""
        if name not in self._weights:
            return super().sample_bytes(name, size_bytes)
        total = self.tensors[name].size_bytes
        size_bytes = min(size_bytes, total)
        start = (total - size_bytes) // 2
        return self.read_bytes(name, start, start + size_bytes).numpy().tobytes()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives."""
        return TORCH_DTYPES[self._dtype] if name in self._weights else super().dtype(name)

    def form_of(self, name: str) -> str:
        """Return the form in which a decoded tensor is stored; else empty."""
        return self._weights[name].form if name in self._weights else ""

    def file_of(self, name: str) -> Path:
        """Return the folder for a decoded tensor, which may be stored as several."""
        return self.folder if name in self._weights else super().file_of(name)

    def close(self) -> None:
        """Close all files."""
        super().close()
        if self._fp8 is not None:
            self._fp8.close()

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


@dataclass(frozen=True, slots=True)
class _Fp8Weight:
    """An FP8 weight, in every form that `Fp8Checkpoint` reads."""

    fp8: Fp8Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.fp8.tensors[self.name].shape

    @property
    def form(self) -> str:
        return "FP8"

    @property
    def parts(self) -> tuple[str, ...]:
        return (self.name,)

    def read(self, checkpoint: Checkpoint, start: int, stop: int) -> torch.Tensor:
        del checkpoint  # `fp8` has its own
        return self.fp8.read_rows(self.name, start, stop)


class _Fp8Part(Checkpoint):
    """What is left of a checkpoint without weights of other forms, for `Fp8Checkpoint`."""

    def without(self, parts: Collection[str]) -> _Fp8Part:
        """Leave out tensors."""
        kept = {name: entry for name, entry in self.tensors.items() if name not in parts}
        self.tensors = MappingProxyType(kept)
        return self

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


def _find_weights(
    checkpoint: Checkpoint, quantized: QuantizedModel
) -> Iterator[tuple[str, StoredWeight]]:
    """Find the weights that are not FP8.

    Raises:
        ModelError: a weight does not fit its scales, or its inputs are rotated.
    """
    yield from find_fp4(checkpoint)
    if quantized.method == "compressed-tensors":
        yield from find_integers(checkpoint)
    if quantized.config.get("transform_config"):
        raise ModelError(
            f"{checkpoint.folder}: transform_config rotates the inputs of its weights",
            hint="name the unquantized model",
        )


def _open_fp8(
    checkpoint: Checkpoint, files: Mapping[str, TensorFile], parts: Collection[str]
) -> Fp8Checkpoint | None:
    """Open the FP8 weights of a checkpoint; None if there are none."""
    if not any(
        entry.dtype.startswith("F8_") and name not in parts and not is_companion(name)
        for name, entry in checkpoint.tensors.items()
    ):
        return None
    if not parts:
        return Fp8Checkpoint.open(checkpoint.folder, fuse=False)
    rest = _Fp8Part(checkpoint.folder, files=files, index=checkpoint.index).without(parts)
    return Fp8Checkpoint(rest, fuse=False, through_float16=False, keeps_equal_scales=False)
