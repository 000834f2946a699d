"""Read a checkpoint that is quantized already as the model that it holds: codes times scales.

`calibrate` and `verify` run such a model where no unquantized one is published. Weights are decoded
one at a time, and rounded to the dtype that config.json names.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import MappingProxyType

import torch

from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.checkpoint.header import ITEM_SIZE_BYTES, TensorEntry
from fp8calib.checkpoint.model_config import find_quantization_configs, without_quantization
from fp8calib.checkpoint.tensor_file import TORCH_DTYPES, TensorFile
from fp8calib.checkpoint.weight_index import WeightIndex
from fp8calib.dialects.fp8.checkpoint import Fp8Checkpoint
from fp8calib.dialects.fp8.pairing import is_fp8_checkpoint
from fp8calib.dialects.fp8.weights import is_companion
from fp8calib.dialects.graft import find_quantized
from fp8calib.errors import ModelError, shorten
from fp8calib.quantization.sources.already_quantized import describe_weights
from fp8calib.quantization.sources.dequantized import find_dtype
from fp8calib.quantization.sources.fp4 import COMPANIONS, find_fp4, has_fp4
from fp8calib.quantization.sources.int4 import unpack

_PACKED = ".weight_packed"
_INTEGER_BITS = (4, 8)
_FLOATS = frozenset({"BF16", "F16", "F32"})
_READ = (
    "calibrate and verify read FP8 checkpoints, symmetric INT4 and INT8 weights of "
    "compressed-tensors, NVFP4 of compressed-tensors and ModelOpt, and compressed-tensors' MXFP4"
)


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
    if has_fp4(checkpoint):
        return DecodedFp4.open(folder)
    if is_fp8_checkpoint(folder) and not _has_integers(checkpoint):
        return DecodedFp8.open(folder)
    if quantized.method == "compressed-tensors" and _has_integers(checkpoint):
        return DecodedIntegers.open(folder)
    facts = describe_weights(quantized.config)
    raise ModelError(
        f"{folder} is already quantized (quant_method {quantized.method})"
        + (f", with {facts}" if facts else ""),
        hint=f"{if_quantized}; {_READ}",
    )


class DecodedCheckpoint(Checkpoint):
    """A quantized checkpoint whose weights are read in the dtype that config.json names."""

    _dtype: str
    _decoded: Mapping[str, tuple[int, ...]]

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        self._stored = Checkpoint(folder, files=files, index=index)

    @property
    def stored(self) -> Checkpoint:
        """The checkpoint as it is on disk, with its codes and scales."""
        return self._stored

    def _decode(self, shapes: Mapping[str, tuple[int, ...]], others: Collection[str]) -> None:
        """Set the weights that are decoded, by name, and the other tensors of the model."""
        self._dtype = find_dtype(super().load_config())
        self._decoded = shapes
        size = ITEM_SIZE_BYTES[self._dtype]
        entries = {name: self.tensors[name] for name in others}
        entries |= {
            name: TensorEntry(self._dtype, shape, 0, prod(shape) * size)
            for name, shape in shapes.items()
        }
        self.tensors = MappingProxyType(entries)

    @abstractmethod
    def _read_values(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Decode rows of a weight: fp32."""

    def load_config(self) -> dict[str, object]:
        """Load `config.json` without the sections on quantization."""
        return without_quantization(super().load_config())

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor, in the dtype of `tensors`."""
        shape = self._decoded.get(name)
        return super().read(name) if shape is None else self.read_rows(name, 0, shape[0])

    def read_as_mapped(self, name: str) -> torch.Tensor:
        """Read a whole tensor; a decoded one is nowhere in a file."""
        return self.read(name) if name in self._decoded else super().read_as_mapped(name)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read rows of the first axis, in the dtype of `tensors`."""
        if name not in self._decoded:
            return super().read_rows(name, start, stop)
        return self._read_values(name, start, stop).to(TORCH_DTYPES[self._dtype])

    def read_block(self, name: str, index: int, rows: range, columns: range) -> torch.Tensor:
        """Read a part of one matrix of a 3-D tensor."""
        if name not in self._decoded:
            return super().read_block(name, index, rows, columns)
        matrix = self.read_rows(name, index, index + 1)[0]
        return matrix[rows.start : rows.stop, columns.start : columns.stop]

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read bytes of a tensor's data in the dtype of `tensors`."""
        if name not in self._decoded:
            return super().read_bytes(name, start, stop)
        entry = self.tensors[name]
        row_bytes = entry.size_bytes // entry.shape[0]
        first, last = start // row_bytes, -(-stop // row_bytes)
        data = self.read_rows(name, first, last).contiguous().view(torch.uint8).reshape(-1)
        return data[start - first * row_bytes : stop - first * row_bytes]

    def sample_bytes(self, name: str, size_bytes: int) -> bytes:
        """Read bytes from the middle of a tensor."""
        if name not in self._decoded:
            return super().sample_bytes(name, size_bytes)
        total = self.tensors[name].size_bytes
        size_bytes = min(size_bytes, total)
        start = (total - size_bytes) // 2
        return self.read_bytes(name, start, start + size_bytes).numpy().tobytes()

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that `read` gives."""
        return TORCH_DTYPES[self._dtype] if name in self._decoded else super().dtype(name)

    def file_of(self, name: str) -> Path:
        """Return the folder for a decoded tensor, which may be stored as several."""
        return self.folder if name in self._decoded else super().file_of(name)

    def __contains__(self, name: object) -> bool:
        return name in self.tensors


class DecodedFp8(DecodedCheckpoint):
    """A checkpoint of FP8 weights, in every form that `Fp8Checkpoint` reads."""

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        self._fp8 = Fp8Checkpoint.open(folder, fuse=False)
        self.form = f"FP8 weights ({self._fp8.dialect.name})"
        shapes = {name: self._fp8.tensors[name].shape for name in sorted(self._fp8.quantized)}
        others = [name for name in self._fp8.tensors if name not in shapes]
        self._decode(shapes, others)

    def _read_values(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._fp8.read_rows(name, start, stop)

    def close(self) -> None:
        """Close all files."""
        super().close()
        self._fp8.close()


class DecodedFp4(DecodedCheckpoint):
    """A checkpoint of FP4 weights, in the forms of `fp8calib.quantization.sources.fp4`."""

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        self._weights = dict(find_fp4(self.stored))
        forms = sorted({weight.form for weight in self._weights.values()})
        self.form = f"{' and '.join(forms)} weights"
        parts = {weight.stored for weight in self._weights.values()}
        parts |= {name for name in self.tensors if name.rpartition(".")[2] in COMPANIONS}
        others = [name for name in self.tensors if name not in parts and not is_companion(name)]
        for name in others:
            if self.tensors[name].dtype not in _FLOATS and name.endswith(".weight"):
                raise ModelError(
                    f"{folder}: {shorten(name)} is stored in {self.tensors[name].dtype}, beside "
                    f"{self.form}: mixed forms are not read",
                    hint=f"{_READ}; or name the unquantized model",
                )
        self._decode({name: weight.shape for name, weight in self._weights.items()}, others)

    def _read_values(self, name: str, start: int, stop: int) -> torch.Tensor:
        return self._weights[name].read(self.stored, start, stop)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Integers:
    """The stored integers of a weight [out, in]."""

    stored: str
    shape: tuple[int, int]
    scale: str
    bits: int


class DecodedIntegers(DecodedCheckpoint):
    """A checkpoint of symmetric INT4 or INT8 weights in compressed-tensors.

    A weight is `X.weight_packed` (integers in words of an int32, the first in the lowest bits, each
    plus half of their range) with `X.weight_shape`, or int8 `X.weight`. Its scale `X.weight_scale`
    is one number, or one for each row, or for each row and group of columns. Formats and layout are
    those of compressed-tensors 0.20 (`compressors/pack_quantized`, `naive_quantized`).
    """

    def __init__(
        self, folder: Path, *, files: Mapping[str, TensorFile], index: WeightIndex | None
    ) -> None:
        super().__init__(folder, files=files, index=index)
        if any(
            section.get("transform_config")
            for _, section in find_quantization_configs(Checkpoint.load_config(self))
        ):
            raise self._refusal("transform_config rotates the inputs of its weights")
        found = {each[0]: each[1] for each in self._find_integers()}
        parts = {part for each in found.values() for part in (each.stored, each.scale)}
        parts |= {f"{_module(name)}.weight_shape" for name in found}
        for name in self.tensors.keys() - parts:
            self._refuse_unread(name)
        others = [name for name in self.tensors if name not in parts and not is_companion(name)]
        self._integers = found
        bits = sorted({each.bits for each in found.values()})
        kinds = " and ".join(f"INT{each}" for each in bits)
        self.form = f"{kinds} weights (compressed-tensors)"
        self._decode({name: each.shape for name, each in found.items()}, others)

    def _find_integers(self) -> Iterator[tuple[str, _Integers]]:
        for stored, entry in self.tensors.items():
            module = _module(stored)
            if stored.endswith(_PACKED):
                shape = self._read_shape(f"{module}.weight_shape")
                bits = next((b for b in _INTEGER_BITS if _is_packed(entry, shape, b)), 0)
            elif stored.endswith(".weight") and entry.dtype == "I8" and len(entry.shape) == 2:
                shape, bits = (entry.shape[0], entry.shape[1]), 8
            else:
                continue
            if not bits:
                raise self._refusal(
                    f"{shorten(stored)} is {entry.dtype} {list(entry.shape)}, and its weight "
                    f"{list(shape)}: not integers of 4 or 8 bits"
                )
            scale = f"{module}.weight_scale"
            self._check_scale(scale, shape)
            yield f"{module}.weight", _Integers(stored=stored, shape=shape, scale=scale, bits=bits)

    def _read_shape(self, name: str) -> tuple[int, int]:
        if name not in self.tensors:
            raise self._refusal(f"there is no {shorten(name)}")
        sizes = Checkpoint.read(self, name).flatten().tolist()
        if len(sizes) != 2 or not all(isinstance(size, int) and size > 0 for size in sizes):
            raise self._refusal(f"{shorten(name)} is not the two sizes of a weight")
        return sizes[0], sizes[1]

    def _check_scale(self, name: str, shape: tuple[int, int]) -> None:
        entry = self.tensors.get(name)
        if entry is None or entry.dtype not in _FLOATS:
            raise self._refusal(f"{shorten(name)} is missing, or is no float")
        rows, columns = shape
        is_one = prod(entry.shape) == 1
        is_grid = len(entry.shape) == 2 and entry.shape[0] == rows and entry.shape[1] > 0
        if not is_one and not (is_grid and columns % entry.shape[1] == 0):
            raise self._refusal(
                f"{shorten(name)} has shape {list(entry.shape)} for a weight {list(shape)}"
            )

    def _refuse_unread(self, name: str) -> None:
        """Refuse what the decoding of this class leaves out."""
        entry, leaf = self.tensors[name], name.rpartition(".")[2]
        if leaf in ("weight_zero_point", "weight_g_idx"):
            raise self._refusal(f"{shorten(name)}: zero points and reordered groups are not read")
        if leaf.startswith("weight") and entry.dtype not in _FLOATS:
            raise self._refusal(f"{shorten(name)} is stored in {entry.dtype}")

    def _read_values(self, name: str, start: int, stop: int) -> torch.Tensor:
        weight = self._integers[name]
        codes = Checkpoint.read_rows(self, weight.stored, start, stop)
        if weight.stored.endswith(_PACKED):
            codes = _unpack(codes, weight.shape[1], weight.bits)
        scale = Checkpoint.read(self, weight.scale).to(torch.float32)
        if not bool((scale.isfinite() & (scale >= 0)).all()):
            raise self._refusal(f"{shorten(weight.scale)} holds what is not a scale")
        if scale.numel() == 1:
            return codes.to(torch.float32) * scale.reshape(())
        spread = scale[start:stop].repeat_interleave(weight.shape[1] // scale.shape[1], 1)
        return codes.to(torch.float32) * spread

    def _refusal(self, fault: str) -> ModelError:
        return ModelError(f"{self.folder}: {fault}", hint=f"{_READ}; or name the unquantized model")


def _has_integers(checkpoint: Checkpoint) -> bool:
    return any(
        name.endswith(_PACKED) or (name.endswith(".weight") and entry.dtype == "I8")
        for name, entry in checkpoint.tensors.items()
    )


def _is_packed(entry: TensorEntry, shape: tuple[int, int], bits: int) -> bool:
    words = -(-shape[1] // (32 // bits))
    return entry.dtype == "I32" and entry.shape == (shape[0], words)


def _unpack(words: torch.Tensor, num_columns: int, bits: int) -> torch.Tensor:
    if bits == 4:
        return unpack(words, num_columns)
    octets = words.contiguous().view(torch.uint8).reshape(len(words), -1)[:, :num_columns]
    return octets.to(torch.int16) - 128


def _module(name: str) -> str:
    return name.rpartition(".")[0]
