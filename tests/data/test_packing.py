"""Tests of fp8calib.data.packing."""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from fp8calib.data.packing import PackedRows, encode_rows, hash_tokens, keep_rows, pack_rows
from fp8calib.data.rows import Row
from fp8calib.errors import DataError

from .tokenizers import PLAIN_TEMPLATE, make_tokenizer


def refuse_tokenizer() -> Any:
    raise AssertionError("no row needs a tokenizer")


def encode(*rows: Row, vocab_size: int = 12, **options: Any) -> list[list[int]]:
    encoded = encode_rows(rows, tokenizer=lambda: make_tokenizer(**options), vocab_size=vocab_size)
    return [list(ids) for ids in encoded]


def lists(packed: PackedRows) -> list[list[int]]:
    return [sequence.tolist() for sequence in packed.sequences]


def test_every_text_row_gets_the_tokenizers_own_special_tokens() -> None:
    rows = (Row("x:1", text="a b"), Row("x:2", text="zebra"))
    assert encode(*rows) == [[0, 7, 8], [0, 2]]
    assert encode(*rows, adds_bos=False) == [[7, 8], [2]]


def test_conversations_are_rendered_and_blank_text_has_no_tokens() -> None:
    rows = (Row("x:1", messages=({"role": "user", "content": "a"},)), Row("x:2", text=" \n"))
    assert encode(*rows, template=PLAIN_TEMPLATE) == [[0, 3, 6, 7], []]


def test_input_ids_are_taken_as_they_are_without_a_tokenizer() -> None:
    rows = [Row("x:1", input_ids=(0, 11, 5))]
    encoded = encode_rows(rows, tokenizer=refuse_tokenizer, vocab_size=12)
    assert list(encoded) == [(0, 11, 5)]


def test_a_text_longer_than_the_context_is_tokenized_without_warning(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.DEBUG):
        assert encode(Row("x:1", text="a b c d e a")) == [[0, 7, 8, 9, 10, 11, 7]]
    assert caplog.text == ""
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("row", "vocab_size", "message"),
    [
        (
            Row("x:4", input_ids=(1, 12)),
            12,
            "x:4: input_ids holds 12 at position 1, but the model's vocabulary is 0 to 11",
        ),
        (
            Row("x:4", input_ids=(-1, 2)),
            12,
            "x:4: input_ids holds -1 at position 0, but the model's vocabulary is 0 to 11",
        ),
        (
            Row("x:4", text="a b"),
            8,
            "x:4: the tokenizer gives token 8, but the model's embedding holds 0 to 7",
        ),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(row: Row, vocab_size: int, message: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(row, vocab_size=vocab_size)
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("rows", "samples", "expected", "kept_rows"),
    [
        ([[1, 2], [3, 4, 5], [6]], 9, [[1, 2, 3, 4], [5, 6]], [0, 1, 2]),
        ([[1, 2], [3, 4, 5]], 9, [[1, 2, 3, 4]], [0, 1]),
        ([[1, 2, 3], [4], [5]], 9, [[1, 2, 3, 4]], [0, 1]),
        ([list(range(11))], 2, [[0, 1, 2, 3], [4, 5, 6, 7]], [0]),
        ([[1, 2, 3], [1, 2, 3]], 9, [[1, 2, 3, 1], [2, 3]], [0]),
        ([[1], [2]], 9, [[1, 2]], [0, 1]),
        ([[1], []], 9, [], []),
    ],
)
def test_packed_rows_are_joined_and_cut(
    rows: list[list[int]], samples: int, expected: list[list[int]], kept_rows: list[int]
) -> None:
    packed = pack_rows(rows, samples=samples, seq_len=4)
    assert lists(packed) == expected
    assert packed.row_hashes == {hash_tokens(rows[index]) for index in kept_rows}
    assert packed.num_rows == len(rows)
    assert packed.num_dropped == rows.count([])


@pytest.mark.parametrize(
    ("rows", "samples", "expected", "kept_rows"),
    [
        ([[1, 2], [3, 4, 5, 6, 7], [8]], 9, [[1, 2], [3, 4, 5, 6]], [0, 1]),
        ([[1], [], [2, 3]], 9, [[2, 3]], [2]),
        ([[1, 2], [1, 2]], 9, [[1, 2], [1, 2]], [0]),
        ([[1], []], 9, [], []),
    ],
)
def test_unpacked_rows_stay_whole_and_short_ones_are_counted(
    rows: list[list[int]], samples: int, expected: list[list[int]], kept_rows: list[int]
) -> None:
    kept = keep_rows(rows, samples=samples, seq_len=4)
    assert lists(kept) == expected
    assert kept.row_hashes == {hash_tokens(rows[index]) for index in kept_rows}
    assert kept.num_dropped == len(rows) - len(expected)


@pytest.mark.parametrize(("make", "expected"), [(pack_rows, 4), (keep_rows, 2)])
def test_no_row_is_read_that_is_not_needed(make: Any, expected: int) -> None:
    read: list[int] = []

    def endless() -> Iterator[Sequence[int]]:
        while True:
            read.append(len(read))
            yield [1, 2]

    assert len(make(endless(), samples=2, seq_len=4).sequences) == 2
    assert len(read) == expected


def test_sequences_share_no_memory_with_their_neighbours() -> None:
    packed = pack_rows([list(range(8))], samples=2, seq_len=4)
    assert [sequence.untyped_storage().nbytes() for sequence in packed.sequences] == [32, 32]


def test_a_row_is_hashed_over_all_its_tokens_as_little_endian_int64() -> None:
    digest = hashlib.sha256(b"\x01" + b"\x00" * 7 + b"\x00\x01" + b"\x00" * 6).digest()
    assert hash_tokens([1, 256]) == int.from_bytes(digest[:8], "little", signed=True)
