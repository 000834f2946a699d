"""Read the header of a safetensors file; the library safetensors checks it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from fp8calib.checkpoint.hub import RANGED_FILES
from fp8calib.checkpoint.json_files import parse_unique_keys
from fp8calib.errors import ModelError, shorten
from fp8calib.numerics.arrays import STORED_DTYPES

ITEM_SIZE_BYTES: Mapping[str, int] = MappingProxyType(
    {name: np.dtype(plain).itemsize for name, (plain, _) in STORED_DTYPES.items()}
)
INTEGERS = frozenset({"I8", "U8", "I16", "U16", "I32", "U32", "I64", "U64"})
FLOATS = frozenset({"BF16", "F16", "F32"})
"""The dtypes of unquantized weights."""
PACKED_BITS: Mapping[str, int] = MappingProxyType({"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6})
"""Formats smaller than a byte; a tensor fills whole bytes. Their values are never read."""
_LFS_POINTER = b"version "
# How errors of safetensors begin, and what they say of a file of another size.
_PREFIX = "Error while deserializing header: "
_CUT = frozenset({"header too small", "invalid header length"})
_ENDS_ELSEWHERE = "incomplete metadata, file not fully covered"
"""Said last, after all else is checked."""
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


def read_header(path: Path) -> tuple[Mapping[str, TensorEntry], Mapping[str, str]]:
    """Read and check the header of a safetensors file.

    Returns:
        The tensors, in the order of their data, and the metadata.

    Raises:
        ModelError: the file is missing, truncated, or not a valid safetensors file.
    """
    if not path.is_file():
        raise ModelError(f"{path}: no such file" if not path.exists() else f"{path}: not a file")
    if (ranged := RANGED_FILES.get(path)) is not None:
        ranged.fetch_header()
    try:
        with path.open("rb") as file:
            prefix = file.read(8)
            _check(path, prefix)
            raw = file.read(int.from_bytes(prefix, "little"))
        document: Any = parse_unique_keys(raw.decode())
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ModelError(f"{path}: the header cannot be read: {why}") from error
    metadata = document.pop("__metadata__", None) or {}
    base = 8 + len(raw)
    entries = {}
    for name, fields in document.items():
        # safetensors takes a list of the three fields too, and {"F32": null} for a dtype.
        if not isinstance(fields, dict) or not isinstance(fields["dtype"], str):
            message = f"{path}: tensor {name!a:.200} is not an object with dtype and data_offsets"
            raise ModelError(message)
        start, stop = fields["data_offsets"]
        shape = tuple(fields["shape"])
        entries[name] = TensorEntry(fields["dtype"], shape, base + start, base + stop)
    tensors = dict(sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)))
    end, size_bytes = max((e.stop for e in tensors.values()), default=base), path.stat().st_size
    if end != size_bytes:
        fault = "truncated" if end > size_bytes else "longer than its header says"
        message = f"{path}: {fault}: header says the file has {end} bytes, it has {size_bytes}"
        raise ModelError(message, hint=_TRUNCATED_HINT)
    return MappingProxyType(tensors), MappingProxyType(metadata)


def _check(path: Path, prefix: bytes) -> None:
    """Let safetensors check all but whether the file ends where its last tensor does."""
    fault, hint = "a Git LFS pointer, not the weights", "run `git lfs pull` in the folder"
    if prefix != _LFS_POINTER:
        try:
            with safe_open(path, framework="numpy"):
                return
        except SafetensorError as error:
            why = str(error).removeprefix(_PREFIX)
        if why == _ENDS_ELSEWHERE:
            return
        fault, hint = f"not a safetensors file: {shorten(why)}", ""
        if why in _CUT:
            fault = f"truncated: {path.stat().st_size} bytes cannot hold its header"
            hint = _TRUNCATED_HINT
    raise ModelError(f"{path}: {fault}", hint=hint)


def encode_header(document: Mapping[str, object]) -> bytes:
    """Encode a header and its length; tensors begin at a multiple of eight bytes."""
    text = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
