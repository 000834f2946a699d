"""Checkpoint files built by hand, byte for byte."""

import json
import struct


def pack(header: object, data: bytes = b"") -> bytes:
    """Assemble a safetensors file: eight bytes of length, JSON, data."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def describe(dtype: str, shape: list[int], start: int, stop: int) -> dict[str, object]:
    """Describe one tensor of a header."""
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


GOLDEN_HEADER = (
    b'{"__metadata__":{"format":"pt"},'
    b'"b":{"dtype":"BF16","shape":[2,2],"data_offsets":[12,20]},'
    b'"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},'
    b'"none":{"dtype":"F16","shape":[0,7],"data_offsets":[20,20]},'
    b'"scalar":{"dtype":"F32","shape":[],"data_offsets":[20,24]},'
    b'"bytes":{"dtype":"U8","shape":[5],"data_offsets":[24,29]}}   '
)
GOLDEN_DATA = (
    struct.pack("<3f", 1.0, -2.5, 448.0)
    + struct.pack("<4H", 0x3F80, 0xBF80, 0x4000, 0x3F00)  # bfloat16 1, -1, 2, 0.5
    + struct.pack("<f", 0.125)
    + bytes([10, 20, 30, 40, 50])
)
GOLDEN_FILE = pack(GOLDEN_HEADER, GOLDEN_DATA)
