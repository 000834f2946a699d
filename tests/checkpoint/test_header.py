"""Headers too large for a line of `tests/cli/refusals.tsv`, which has the other broken ones."""

from pathlib import Path

import pytest

from fp8calib.checkpoint.header import read_header
from fp8calib.errors import ModelError
from tests.checkpoint.handmade import describe, pack

BROKEN = {
    "deep nesting": (pack(b'{"a":' + b"[" * 200_000), "recursion limit"),
    "huge integer": (pack(b'{"a":' + b"9" * 9000 + b"}"), "number out of range"),
    "overflowing shape": (
        pack({"a": describe("F32", [10**18] * 1000, 0, 4)}, bytes(4)),
        "overflow",
    ),
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
