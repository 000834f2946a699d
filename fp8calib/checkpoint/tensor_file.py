"""A safetensors file: tensors are read one at a time without mmap, and written all at once."""

from __future__ import annotations

import io
import json
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import PACKED_BITS, TensorEntry, encode_header, read_header
from fp8calib.checkpoint.hub import RANGED_FILES
from fp8calib.checkpoint.output import write_file_atomic
from fp8calib.errors import ModelError, shorten
from fp8calib.numerics.arrays import decode_floats

if TYPE_CHECKING:  # `check` and `show` need no torch
    import torch

_CACHE_LINE_BYTES = 64
_READ_CHUNK_BYTES = 1 << 30  # Linux moves at most 2 GiB in one call


class TensorReader(ABC):
    """Tensors that are read one at a time, into memory of their own.

    Files are opened by the first read and stay open until `close`. Reads are positional, so several
    threads may share one object. Because nothing is mapped, the files' pages do not count as memory
    of the process. A read raises a ModelError if there is no such tensor or it cannot be read, and
    an IndexError if the tensor has no such part.
    """

    place: Path
    """The file or folder that errors name."""
    tensors: Mapping[str, TensorEntry]
    """The tensors as they are read, in the order of their data."""

    @abstractmethod
    def find_file(self, name: str) -> TensorFile:
        """Find the file that holds a tensor."""

    @abstractmethod
    def close(self) -> None:
        """Close all files; a later read opens its file again."""

    def make_rows(self, name: str, rows: slice) -> torch.Tensor | None:  # noqa: ARG002
        """Give rows of a tensor that is computed; None for one that is read from a file."""
        return None

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that a tensor is read in."""
        from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES  # noqa: PLC0415 -- imports torch

        return TORCH_DTYPES[self._entry(name).dtype]

    def read(self, name: str) -> torch.Tensor:
        """Read a whole tensor."""
        entry, dtype = self._entry(name), self.dtype(name)
        if (made := self.make_rows(name, slice(None))) is not None:
            return made.reshape(entry.shape)
        room = np.empty(entry.size_bytes + _CACHE_LINE_BYTES, dtype=np.uint8)
        # Its address modulo 64 is that in a mapped file: the rounding of matrix products depends on
        # alignment, and programs that map the file then compute the same last bits.
        shift = (entry.start - room.ctypes.data) % _CACHE_LINE_BYTES
        if entry.start % dtype.itemsize:  # such a tensor cannot be used unaligned
            shift = -room.ctypes.data % _CACHE_LINE_BYTES
        data = room[shift : shift + entry.size_bytes]
        self.find_file(name).fill(data, entry.start)
        return _as_tensor(data).view(dtype).reshape(entry.shape)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the rows `start` to `stop` (exclusive) of the leading dimension."""
        entry, dtype = self._entry(name), self.dtype(name)
        if (made := self.make_rows(name, slice(start, stop))) is not None:
            return made
        row_bytes = entry.size_bytes // max(entry.shape[0], 1)
        data = self.read_bytes(name, start * row_bytes, stop * row_bytes)
        return data.view(dtype).reshape(stop - start, *entry.shape[1:])

    def read_block(self, name: str, index: int, rows: range, columns: range) -> torch.Tensor:
        """Read consecutive rows and columns of one matrix of a 3-D tensor."""
        entry, dtype = self._entry(name), self.dtype(name)
        count, height, width = entry.shape
        if index >= count or rows.stop > height or columns.stop > width:
            message = f"{name} of shape {list(entry.shape)} has no [{index}, {rows}, {columns}]"
            raise IndexError(message)
        if (made := self.make_rows(name, slice(index, index + 1))) is not None:
            return made[0, rows.start : rows.stop, columns.start : columns.stop]
        file, first = self.find_file(name), (index * height + rows.start) * width + columns.start
        data = np.empty(len(rows) * len(columns) * dtype.itemsize, dtype=np.uint8)
        # Whole rows are one piece of the file.
        pieces = data.reshape(1 if len(columns) == width else len(rows), -1)
        for number, piece in enumerate(pieces):
            file.fill(piece, entry.start + (first + number * width) * dtype.itemsize)
        return _as_tensor(data).view(dtype).reshape(len(rows), len(columns))

    def read_bytes(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Read the bytes `start` to `stop` (exclusive) of a tensor's data: uint8."""
        return _as_tensor(self.read_array(name, start, stop))

    def read_array(self, name: str, start: int, stop: int) -> NDArray[np.uint8]:
        """Read the same bytes as an array; from a file this needs no torch."""
        entry = self._entry(name, as_bytes=True)
        if not 0 <= start <= stop <= entry.size_bytes:
            raise IndexError(f"{name} of {entry.size_bytes} bytes has no bytes {start}:{stop}")
        row_bytes = max(entry.size_bytes // max((entry.shape or (1,))[0], 1), 1)
        first = start // row_bytes
        if (made := self.make_rows(name, slice(first, -(-stop // row_bytes)))) is not None:
            import torch  # noqa: PLC0415 -- slow

            rows: NDArray[np.uint8] = made.contiguous().view(torch.uint8).flatten().numpy()
            return rows[start - first * row_bytes : stop - first * row_bytes]
        data = np.empty(stop - start, dtype=np.uint8)
        self.find_file(name).fill(data, entry.start + start)
        return data

    def read_floats(self, name: str, *, of_scale: bool = False) -> NDArray[np.float32]:
        """Read a whole tensor as fp32 without torch; of complex numbers the real part.

        Integers of a scale are the exponents of MXFP8.
        """
        entry = self._entry(name)
        is_exponent = of_scale and entry.dtype == "U8"
        data = self.read_array(name, 0, entry.size_bytes)
        return decode_floats(data, "F8_E8M0" if is_exponent else entry.dtype).reshape(entry.shape)

    def _entry(self, name: str, *, as_bytes: bool = False) -> TensorEntry:
        """Find a tensor; numbers smaller than a byte are read only as bytes."""
        if name not in self.tensors:
            raise ModelError(f"{self.place}: there is no tensor {name!a:.200}")
        entry = self.tensors[name]
        if entry.dtype in PACKED_BITS and not as_bytes:
            what = f"{shorten(name)} is {entry.dtype}, smaller than a byte, and cannot be read"
            hint = "use a checkpoint in 8 bits or more"
            raise ModelError(f"{self.find_file(name).path}: {what}", hint=hint)
        return entry

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class TensorFile(TensorReader):
    """A safetensors file."""

    def __init__(self, path: Path) -> None:
        self.path = self.place = path
        self.tensors, self.metadata = read_header(path)
        self._file: io.FileIO | None = None
        self._lock = threading.Lock()

    def fetch(self, names: Iterable[str]) -> None:
        """Download tensors at once, if the file is on the Hub; others follow when they are read."""
        if (ranged := RANGED_FILES.get(self.path)) is not None:
            ranged.fetch((self.tensors[name].start, self.tensors[name].stop) for name in names)

    def find_file(self, name: str) -> TensorFile:  # noqa: ARG002
        """Give the file itself."""
        return self

    def close(self) -> None:
        """Close the file; a later read opens it again."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file = None

    def fill(self, room: NDArray[np.uint8], offset: int) -> None:
        """Fill an array with the bytes of the file from `offset` on."""
        target = room.data
        if (ranged := RANGED_FILES.get(self.path)) is not None:
            ranged.fetch([(offset, offset + len(target))])
        done = 0
        try:
            with self._lock:
                if self._file is None:
                    self._file = io.FileIO(self.path, "rb")
                descriptor = self._file.fileno()
            while done < len(target):
                piece = target[done : done + _READ_CHUNK_BYTES]
                size = os.preadv(descriptor, [piece], offset + done)
                if size == 0:
                    raise ModelError(f"{self.path}: the file was truncated while it was read")
                done += size
        except OSError as error:
            raise ModelError(f"{self.path}: cannot be read: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A tensor that is made when it is indexed, like a slice of a file that safetensors opened."""

    entry: TensorEntry
    make: Callable[[], torch.Tensor]

    def get_shape(self) -> list[int]:
        """Give the shape."""
        return list(self.entry.shape)

    def get_dtype(self) -> str:
        """Give the dtype, as safetensors spells it."""
        return self.entry.dtype

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self.make()[index]


def _as_tensor(data: NDArray[np.uint8]) -> torch.Tensor:
    import torch  # noqa: PLC0415 -- slow

    # of an empty array it makes a tensor that cannot be viewed in another dtype
    return torch.from_numpy(data) if len(data) else torch.empty(0, dtype=torch.uint8)


def nonfinite_tensor_error(name: str, value: float, index: Sequence[int]) -> ModelError:
    """Make the error for a stored tensor that holds NaN or infinity at an index."""
    return ModelError(
        f"{name} holds {value} at {list(index)}",
        hint="the checkpoint is damaged, or overflowed in training or conversion",
    )


def save_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], *, metadata: Mapping[str, str]
) -> None:
    """Write a safetensors file atomically; equal tensors and metadata give equal bytes.

    Tensors that share memory are written separately.
    """
    from safetensors.torch import save as serialize  # noqa: PLC0415 -- imports torch

    taken: set[int] = set()
    separate: dict[str, torch.Tensor] = {}  # each contiguous and alone in its storage
    for name, tensor in tensors.items():
        plain = tensor.detach().cpu().contiguous()
        storage = plain.untyped_storage()
        if storage.data_ptr() in taken or storage.nbytes() != plain.nbytes:
            plain = plain.clone()
        taken.add(plain.untyped_storage().data_ptr())
        separate[name] = plain
    raw = serialize(separate)
    if metadata:  # by hand: safetensors orders several keys differently in each process
        start = 8 + int.from_bytes(raw[:8], "little")
        header = {"__metadata__": dict(sorted(metadata.items())), **json.loads(raw[8:start])}
        raw = encode_header(header) + raw[start:]
    write_file_atomic(path, raw)
