"""The header reader against files built by hand, and against safetensors on mutated ones."""

from __future__ import annotations

import json
import struct
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize

from fp8calib.checkpoint.header import ITEM_SIZE_BYTES, TensorEntry, read_header
from fp8calib.errors import ModelError
from tests.checkpoint.handmade import GOLDEN_DATA, GOLDEN_FILE, GOLDEN_HEADER, describe, pack


def test_a_golden_header_is_read_with_absolute_offsets_in_data_order(golden_path: Path) -> None:
    header = read_header(golden_path)

    base = 8 + len(GOLDEN_HEADER)
    assert dict(header.tensors) == {
        "a": TensorEntry("F32", (3,), base, base + 12),
        "b": TensorEntry("BF16", (2, 2), base + 12, base + 20),
        "none": TensorEntry("F16", (0, 7), base + 20, base + 20),
        "scalar": TensorEntry("F32", (), base + 20, base + 24),
        "bytes": TensorEntry("U8", (5,), base + 24, base + 29),
    }
    assert list(header.tensors) == ["a", "b", "none", "scalar", "bytes"]
    assert dict(header.metadata) == {"format": "pt"}


@pytest.mark.parametrize(("dtype", "size_bytes"), sorted(ITEM_SIZE_BYTES.items()))
def test_every_dtype_takes_the_bytes_the_reference_says(
    tmp_path: Path, dtype: str, size_bytes: int
) -> None:
    raw = pack({"x": describe(dtype, [3], 0, 3 * size_bytes)}, bytes(3 * size_bytes))
    path = tmp_path / "one.safetensors"
    path.write_bytes(raw)

    assert deserialize(raw)[0][1]["dtype"] == dtype  # type: ignore[no-untyped-call]
    assert read_header(path).tensors["x"].size_bytes == 3 * size_bytes


def test_a_header_without_tensors_is_a_header(tmp_path: Path) -> None:
    path = tmp_path / "empty.safetensors"
    path.write_bytes(pack({}))

    assert dict(read_header(path).tensors) == {}


F32 = describe("F32", [1], 0, 4)
BROKEN = {
    "empty file": (b"", "0 bytes cannot hold"),
    "seven bytes": (b"\0" * 7, "7 bytes cannot hold"),
    "header longer than file": (struct.pack("<Q", 99_000_000) + b"{}", "truncated"),
    "header over the cap": (struct.pack("<Q", 100_000_001) + b"{}", "header too large"),
    "largest length": (b"\xff" * 8 + b"{}", "not a safetensors file"),
    "git lfs": (b"version https://git-lfs.github.com/spec/v1\n", "Git LFS pointer"),
    "no header": (pack(b""), "not a safetensors file: invalid JSON"),
    "a list": (pack(b"[]"), "invalid type: sequence"),
    "not json": (pack(b"{x}"), "key must be a string"),
    "not utf-8": (pack(b'{"\xff":{}}'), "invalid UTF-8"),
    "deep nesting": (pack(b'{"a":' + b"[" * 200_000), "recursion limit"),
    "NaN": (pack(b'{"a":NaN}'), "expected value"),
    "huge integer": (pack(b'{"a":' + b"9" * 9000 + b"}"), "number out of range"),
    "duplicate tensor": (
        pack(b'{"a":%b,"a":%b}' % ((json.dumps(F32).encode(),) * 2), bytes(4)),
        "'a' occurs twice",
    ),
    "duplicate field": (pack(b'{"a":{"dtype":"F32","dtype":"F16"}}'), "duplicate field `dtype`"),
    "metadata list": (pack({"__metadata__": []}), "expected a map"),
    "metadata number": (pack({"__metadata__": {"a": 1}}), "expected a string"),
    "metadata surrogate": (pack(b'{"__metadata__":{"a":"\\ud800"}}'), "hex escape"),
    "surrogate name": (pack({"a\ud800": F32}, bytes(4)), "hex escape"),
    "tensor is a list": (pack({"a": []}), "expected struct TensorInfo"),
    "tensor is a list of fields": (
        pack({"a": ["F32", [1], [0, 4]]}, bytes(4)),
        "tensor 'a' is not an object",
    ),
    "dtype is an object": (
        pack({"a": {**F32, "dtype": {"F32": None}}}, bytes(4)),
        "tensor 'a' is not an object",
    ),
    "no offsets": (pack({"a": {"dtype": "F32", "shape": []}}), "missing field `data_offsets`"),
    "unknown dtype": (pack({"a": describe("F31", [1], 0, 4)}, bytes(4)), "unknown variant `F31`"),
    "dtype is a list": (pack({"a": {**F32, "dtype": ["F32"]}}, bytes(4)), "expected string"),
    "shape of floats": (pack({"a": {**F32, "shape": [1.0]}}, bytes(4)), "floating point `1.0`"),
    "shape of bools": (pack({"a": {**F32, "shape": [True]}}, bytes(4)), "boolean `true`"),
    "shape is a number": (
        pack({"a": {**F32, "shape": 1}}, bytes(4)),
        "integer `1`, expected a sequence",
    ),
    "negative shape": (pack({"a": {**F32, "shape": [-1]}}, bytes(4)), "integer `-1`"),
    "negative offset": (pack({"a": describe("F32", [1], -4, 0)}, bytes(4)), "integer `-4`"),
    "backward offsets": (
        pack({"a": describe("F32", [1], 4, 0)}, bytes(4)),
        "offset for tensor `a`",
    ),
    "three offsets": (
        pack({"a": {**F32, "data_offsets": [0, 4, 8]}}, bytes(4)),
        "invalid length 3",
    ),
    "wrong length": (
        pack({"a": describe("F32", [2], 0, 4)}, bytes(4)),
        "invalid shape, data type, or offset",
    ),
    "too many bytes": (
        pack({"a": describe("F32", [1], 0, 8)}, bytes(8)),
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
    "overlap": (
        pack({"a": F32, "b": describe("U8", [2], 3, 5)}, bytes(5)),
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


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_missing_file_or_a_folder_is_a_model_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=r"no such file|not a file"):
        read_header(tmp_path / name)


def _mutate(raw: bytes, edits: list[tuple[int, int, bytes]]) -> bytes:
    for position, removed, inserted in edits:
        start = position % (len(raw) + 1)
        raw = raw[:start] + inserted + raw[start + removed :]
    return raw


JSON_TOKENS = (b'"', b"{", b"}", b"[", b"]", b",", b":", b"-", b"0", b"null", b"true")
RARE_TOKENS = (b"9" * 30, b"1e3", b"\\ud800", b"F64", b"I8", b"\xff", b"\0", b" ", b'"a":{},')
TOKENS = st.sampled_from((*JSON_TOKENS, *RARE_TOKENS))
EDITS = st.lists(
    st.tuples(st.integers(0, 500), st.integers(0, 4), TOKENS | st.binary(max_size=3)),
    min_size=1,
    max_size=4,
)


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=EDITS, keeps_length=st.booleans())
def test_a_mutated_file_is_refused_or_read_as_the_reference_reads_it(
    edits: list[tuple[int, int, bytes]], keeps_length: bool
) -> None:
    if keeps_length:
        raw = pack(_mutate(GOLDEN_HEADER, edits), GOLDEN_DATA)
    else:
        raw = _mutate(GOLDEN_FILE, edits)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mutated.safetensors"
        path.write_bytes(raw)
        try:
            tensors = read_header(path).tensors
        except ModelError:
            return

    try:
        reference = dict(deserialize(raw))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise AssertionError(f"accepted what the reference refuses: {raw!r}") from error
    assert {name: list(entry.shape) for name, entry in tensors.items()} == {
        name: entry["shape"] for name, entry in reference.items()
    }
    for name, entry in tensors.items():
        assert raw[entry.start : entry.stop] == bytes(reference[name]["data"])
        assert entry.dtype == reference[name]["dtype"]
