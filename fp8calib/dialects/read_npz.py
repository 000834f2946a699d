"""Single numbers from a numpy archive, without numpy's pickles and without trust in its sizes."""

from __future__ import annotations

import math
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
import torch
from numpy.lib import format as npy

from fp8calib.dialects.read_values import check_precision, refusal
from fp8calib.errors import shorten

_MAX_MEMBER_BYTES = 1 << 16
"""An array of one number takes some 130 bytes, most of it header."""
_COMPRESSIONS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Python unpacks the others without a bound: gigabytes out of some thousand bytes."""
_READ_HEADER = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}


def list_arrays(path: Path) -> list[str]:
    """List the names of the arrays in an archive.

    Raises:
        VerificationError: it is none, or damaged.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except Exception as error:  # zipfile raises ten kinds for damaged archives
        raise refusal(path, f"not a readable .npz archive: {_describe(error)}") from error
    return [name.removesuffix(".npy") for name in names]


def read_number(path: Path, name: str) -> torch.Tensor:
    """Read the one number of an array as fp32 0-dim.

    Raises:
        VerificationError: the array is not a single float, or the archive is damaged.
    """
    try:
        shape, dtype, raw = _read_member(path, name)
    except Exception as error:  # zipfile and numpy raise ten kinds for damaged data
        fault = f"{shorten(name)}: cannot be read: {_describe(error)}"
        raise refusal(path, fault, hint="copy the file again") from error
    if dtype.hasobject:
        raise refusal(
            path, f"{shorten(name)}: pickled, which is not read", hint="save it as a float array"
        )
    if math.prod(shape) != 1 or dtype.kind != "f":
        raise refusal(
            path,
            f"{shorten(name)} is {dtype!s:.60} of shape {list(shape)}",
            hint="a scale is one float",
        )
    if len(raw) != dtype.itemsize:
        raise refusal(path, f"{shorten(name)}: cut short", hint="copy the file again")
    value = torch.tensor(float(np.frombuffer(raw, dtype=dtype)[0]), dtype=torch.float32)
    check_precision(path, shorten(name), value, stored="F16" if dtype == np.float16 else "")
    return value


def _read_member(path: Path, name: str) -> tuple[tuple[int, ...], np.dtype[np.generic], bytes]:
    with zipfile.ZipFile(path) as archive:
        info = archive.getinfo(f"{name}.npy")
        if info.compress_type not in _COMPRESSIONS:
            raise ValueError("compressed in a way that numpy does not write")
        if info.file_size > _MAX_MEMBER_BYTES:
            raise ValueError(f"{info.file_size} bytes are more than one number")
        with archive.open(info) as member:
            return _read_array(member)


def _read_array(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[np.generic], bytes]:
    version = npy.read_magic(member)
    if version not in _READ_HEADER:
        raise ValueError(f"version {version} of the .npy format")
    shape, _, dtype = _READ_HEADER[version](member)
    return shape, dtype, member.read(min(dtype.itemsize, _MAX_MEMBER_BYTES))


def _describe(error: Exception) -> str:
    """Show what went wrong, in ASCII: a damaged archive's message repeats its bytes."""
    return f"{type(error).__name__}, {error!s:.160}".encode("ascii", "backslashreplace").decode()
