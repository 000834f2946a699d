"""The header reader against files built by hand, and against safetensors on mutated ones."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

from fp8calib.checkpoint.header import read_header
from fp8calib.errors import ModelError
from tests.checkpoint.handmade import GOLDEN_FILE, describe, pack

F32 = describe("F32", [1], 0, 4)
BROKEN = {
    "seven bytes": (b"\0" * 7, "7 bytes cannot hold"),
    "header longer than file": (struct.pack("<Q", 99_000_000) + b"{}", "truncated"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "no header": (pack(b""), "not a safetensors file: invalid JSON"),
    "deep nesting": (pack(b'{"a":' + b"[" * 200_000), "recursion limit"),
    "huge integer": (pack(b'{"a":' + b"9" * 9000 + b"}"), "number out of range"),
    "duplicate tensor": (
        pack(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(4)),
        "'a' occurs twice",
    ),
    "surrogate name": (pack({"a\ud800": F32}, bytes(4)), "hex escape"),
    "tensor is a list of fields": (
        pack({"a": ["F32", [1], [0, 4]]}, bytes(4)),
        "tensor 'a' is not an object",
    ),
    "dtype is an object": (
        pack({"a": {**F32, "dtype": {"F32": None}}}, bytes(4)),
        "tensor 'a' is not an object",
    ),
    "wrong length": (
        pack({"a": describe("F32", [2], 0, 4)}, bytes(4)),
        "invalid shape, data type, or offset",
    ),
    "overflowing shape": (
        pack({"a": describe("F32", [10**18] * 1000, 0, 4)}, bytes(4)),
        "overflow",
    ),
    "gap": (
        pack({"a": F32, "b": describe("U8", [1], 5, 6)}, bytes(6)),
        "invalid offset for tensor `b`",
    ),
    "data cut": (
        GOLDEN_FILE[:-3],
        f"header says the file has {len(GOLDEN_FILE)} bytes, it has {len(GOLDEN_FILE) - 3}",
    ),
    "data too long": (GOLDEN_FILE + b"\0", "longer than its header says"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_file_is_a_model_error_that_names_file_and_fault(
    tmp_path: Path, fault: str
) -> None:
    raw, expected = BROKEN[fault]
    path = tmp_path / "broken.safetensors"
    path.write_bytes(raw)

    with pytest.raises(ModelError) as caught:
        read_header(path)

    assert expected in caught.value.message
    assert str(path) in caught.value.message
    assert len(caught.value.message) < 700 + len(str(path))
