"""Decode stored numbers to fp32 by numpy: importing torch costs more than `check` does."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp8calib.numerics.formats import E4M3FN, E4M3FNUZ, E5M2, E5M2FNUZ

_FP8 = {
    "F8_E4M3": E4M3FN,
    "F8_E5M2": E5M2,
    "F8_E4M3FNUZ": E4M3FNUZ,
    "F8_E5M2FNUZ": E5M2FNUZ,
}
_EXPONENTS = "F8_E8M0"
STORED_DTYPES = {
    "BOOL": ("?", "bool"),
    "U8": ("u1", "uint8"),
    "I8": ("i1", "int8"),
    **{name: ("V1", fmt.dtype_name) for name, fmt in _FP8.items()},
    _EXPONENTS: ("V1", "float8_e8m0fnu"),
    "U16": ("<u2", "uint16"),
    "I16": ("<i2", "int16"),
    "F16": ("<f2", "float16"),
    "BF16": ("V2", "bfloat16"),
    "U32": ("<u4", "uint32"),
    "I32": ("<i4", "int32"),
    "F32": ("<f4", "float32"),
    "U64": ("<u8", "uint64"),
    "I64": ("<i8", "int64"),
    "F64": ("<f8", "float64"),
    "C64": ("<c8", "complex64"),
}
"""By safetensors' name of a dtype of whole bytes: numpy's, or V and its bytes, and torch's."""


def decode_floats(data: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """Give the numbers of the bytes of a tensor in fp32; of complex numbers the real part.

    Args:
        data: [bytes], which may be a view of a file's data.
        dtype: as safetensors spells it, of at least a byte.
    """
    if dtype == "BF16":
        return (data.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype in _FP8 or dtype == _EXPONENTS:
        return _list_values(dtype)[data]
    numbers: NDArray[Any] = data.view(STORED_DTYPES[dtype][0])
    with np.errstate(over="ignore", invalid="ignore"):
        return numbers.real.astype(np.float32)


def round_number(value: float, dtype: str) -> float:
    """Round a number to fp32, and then to `float16`, `bfloat16` or `float32`."""
    with np.errstate(over="ignore"):
        single = np.float32(value)
        if dtype == "float16":
            return float(np.float16(single))
    if dtype == "float32" or not np.isfinite(single):
        return float(single)
    bits = int(single.view(np.uint32))
    bits += 0x7FFF + (bits >> 16 & 1)  # half of the last place, less a bit where it is even
    return float(np.uint32(bits & 0xFFFF0000).view(np.float32))


@cache
def _list_values(dtype: str) -> NDArray[np.float32]:
    """List the values of the 256 codes of a format."""
    if dtype == _EXPONENTS:
        return np.array([*(2.0 ** (code - 127) for code in range(255)), np.nan], dtype=np.float32)
    return np.array([_FP8[dtype].value_of(code) for code in range(256)], dtype=np.float32)
