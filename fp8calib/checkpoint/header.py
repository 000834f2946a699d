"""Read and check the header of a safetensors file, without reading the data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from fp8calib.checkpoint.json_files import parse_strict
from fp8calib.errors import ModelError

MAX_HEADER_BYTES = 100_000_000  # the cap of the reference implementation
_DTYPES_BY_SIZE = {
    1: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E4M3FNUZ F8_E5M2FNUZ F8_E8M0",
    2: "U16 I16 F16 BF16",
    4: "U32 I32 F32",
    8: "U64 I64 F64 C64",
}
ITEM_SIZE_BYTES: Mapping[str, int] = MappingProxyType(
    {dtype: size for size, dtypes in _DTYPES_BY_SIZE.items() for dtype in dtypes.split()}
)
INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
FLOATS = frozenset({"BF16", "F16", "F32"})
"""The dtypes of unquantized weights."""
PACKED_BITS: Mapping[str, int] = MappingProxyType({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6})
"""Formats smaller than a byte; a tensor fills whole bytes. Their values are never read."""
_ITEM_SIZE_BITS = {**{name: 8 * size for name, size in ITEM_SIZE_BYTES.items()}, **PACKED_BITS}
_LFS_POINTER = b"version "
_TRUNCATED_HINT = "download or copy the file again"


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a file; `start` and `stop` count from the first byte of the file.

    `dtype` is the file's name for it, for example "BF16".
    """

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """The size of the tensor in the file."""
        return self.stop - self.start


@dataclass(frozen=True)
class ShardHeader:
    """The header of one safetensors file; tensors are in the order of their data."""

    tensors: Mapping[str, TensorEntry]
    metadata: Mapping[str, str]


def read_header(path: Path) -> ShardHeader:
    """Read and check the header of a safetensors file.

    The header's length is checked against the file and the limit before anything is allocated.

    Raises:
        ModelError: the file is missing, truncated, or not a valid safetensors file.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = _check_length(path, file.read(8), size_bytes)
            raw = file.read(length)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read: {error.strerror}") from error
    try:
        header = _parse_header(raw)
    except ValueError as error:
        raise ModelError(f"{path}: {error}") from error
    end = max((entry.stop for entry in header.tensors.values()), default=8 + length)
    if end != size_bytes:
        fault = "truncated" if end > size_bytes else "longer than its header says"
        message = f"{path}: {fault}: header says the file has {end} bytes, it has {size_bytes}"
        raise ModelError(message, hint=_TRUNCATED_HINT)
    return header


def encode_header(document: Mapping[str, object]) -> bytes:
    """Encode a header and its length; tensors begin at a multiple of eight bytes."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _check_length(path: Path, prefix: bytes, size_bytes: int) -> int:
    if prefix == _LFS_POINTER:
        message = f"{path}: a Git LFS pointer, not the weights"
        raise ModelError(message, hint="run `git lfs pull` in the folder")
    if len(prefix) < 8:
        message = f"{path}: truncated: {size_bytes} bytes cannot hold a safetensors header"
        raise ModelError(message, hint=_TRUNCATED_HINT)
    length = int.from_bytes(prefix, "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{path}: not a safetensors file: its header would be {length} bytes long")
    if 8 + length > size_bytes:
        message = (
            f"{path}: truncated: the header alone ends at byte {8 + length}, "
            f"the file has {size_bytes} bytes"
        )
        raise ModelError(message, hint=_TRUNCATED_HINT)
    return length


def _parse_header(raw: bytes) -> ShardHeader:
    """Parse a header; a ValueError says what is wrong with it."""
    if not raw.startswith(b"{"):
        raise ValueError("not a safetensors file: its header is not a JSON object")
    try:
        document = parse_strict(raw.decode("utf-8"), counts_only=True)
    except ValueError as error:
        raise ValueError(f"the header is not valid: {error}") from error
    assert isinstance(document, dict)  # noqa: S101 -- it starts with a brace
    metadata = document.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(
        isinstance(text, str) for text in metadata.values()
    ):
        raise ValueError("__metadata__ is not an object of strings")
    if not all(_is_unicode(key) and _is_unicode(text) for key, text in metadata.items()):
        raise ValueError("__metadata__ holds text that is not valid Unicode")
    start = end = 8 + len(raw)
    entries = {name: _parse_entry(name, fields, start) for name, fields in document.items()}
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    for name, entry in tensors.items():
        if entry.start != end:
            fault = "overlaps the tensor before it" if entry.start < end else "leaves a gap before"
            raise ValueError(f"tensor {name!a:.200}: its data {fault} (byte {entry.start})")
        end = entry.stop
    return ShardHeader(MappingProxyType(tensors), MappingProxyType(metadata))


def _parse_entry(name: str, fields: object, data_start: int) -> TensorEntry:
    where = f"tensor {name!a:.200}"
    if not _is_unicode(name):
        raise ValueError(f"{where}: the name is not valid Unicode")
    if not isinstance(fields, dict) or not {"dtype", "shape", "data_offsets"} <= fields.keys():
        raise ValueError(f"{where}: not an object with dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _ITEM_SIZE_BITS:
        raise ValueError(f"{where}: unknown dtype {dtype!a:.60}")
    if not _is_count_list(shape):
        raise ValueError(f"{where}: shape {shape!a:.60} is not a list of sizes")
    if not _is_count_list(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{where}: data_offsets {offsets!a:.60} are not a start and a stop")
    start, stop = offsets
    needed_bits = 0 if 0 in shape else _ITEM_SIZE_BITS[dtype]
    for size in shape:
        needed_bits *= size
        if needed_bits >= 2**66:  # no file can hold it: integers stay small
            break
    if (stop - start) * 8 != needed_bits:
        needed = f"{needed_bits / 8:.15g}"
        raise ValueError(f"{where}: {dtype} {shape!r:.60} takes {needed} bytes, not {stop - start}")
    return TensorEntry(dtype, tuple(shape), data_start + start, data_start + stop)


def _is_count_list(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)
