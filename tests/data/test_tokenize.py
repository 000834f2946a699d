"""Rows become token ids with one BOS, and sequences of the requested length."""

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from fp8calib.data.plan import RowEncoder, pack_rows, render_messages
from fp8calib.data.rows import Row
from fp8calib.data.sequences import RowsUsed
from fp8calib.errors import DataError
from tests.data.tokenizers import PLAIN_TEMPLATE, make_tokenizer

MESSAGES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]
WITHOUT_BOS = [3, 6, 7, 8, 4, 6, 9]
WITH_BOS = [0, *WITHOUT_BOS]


def refuse_tokenizer() -> Any:
    raise AssertionError("no row needs a tokenizer")


def encode(*rows: Row, vocab_size: int = 12, **options: Any) -> list[list[int]]:
    encoded = RowEncoder(lambda: make_tokenizer(**options), vocab_size).encode(rows)
    return [list(ids) for ids in encoded]


def cut_into_fours(count: int) -> list[list[int]]:
    return [list(range(start, start + 4)) for start in range(0, count, 4)]


def pack_into_fours(
    rows: Iterable[Sequence[int]], samples: int, *, pack: bool = True
) -> tuple[list[list[int]], RowsUsed]:
    counts = RowsUsed()
    sequences, _ = pack_rows(rows, counts, samples=samples, seq_len=4, pack=pack)
    return [sequence.tolist() for sequence in sequences], counts


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
            "x:4: the text gives token 8 (b), but the model's embedding has rows 0 to 7",
        ),
    ],
)
def test_a_token_outside_the_vocabulary_is_named(row: Row, vocab_size: int, message: str) -> None:
    with pytest.raises(DataError) as caught:
        encode(row, vocab_size=vocab_size)
    assert caught.value.message == message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("rows", "samples", "expected", "used"),
    [
        ([[1, 2], [3, 4, 5], [6]], 9, [[1, 2, 3, 4], [5, 6]], 3),
        ([[1, 2], [3, 4, 5]], 9, [[1, 2, 3, 4]], 2),
        ([[1, 2, 3], [4], [5]], 9, [[1, 2, 3, 4]], 2),
        ([[1, 2, 3], [], [4], [5]], 9, [[1, 2, 3, 4]], 2),
        ([list(range(11))], 2, [[0, 1, 2, 3], [4, 5, 6, 7]], 1),
        ([list(range(90))], 10, cut_into_fours(40), 1),
        ([[7] * 9, list(range(90))], 3, [[7] * 4, [7] * 4, [7, 0, 1, 2]], 2),
        ([[1, 2, 3], [1, 2, 3]], 9, [[1, 2, 3, 1], [2, 3]], 2),
        ([[1], [2]], 9, [[1, 2]], 2),
        ([[1], []], 9, [], 0),
        ([], 9, [], 0),
    ],
)
def test_packed_rows_are_joined_and_cut(
    rows: list[list[int]], samples: int, expected: list[list[int]], used: int
) -> None:
    packed, counts = pack_into_fours(rows, samples)
    assert packed == expected
    assert (counts.used, counts.too_short) == (used, rows.count([]))


@pytest.mark.parametrize(
    ("rows", "samples", "expected"),
    [
        ([[1, 2], [3, 4, 5, 6, 7], [8]], 9, [[1, 2], [3, 4, 5, 6]]),
        ([[1], [], [2, 3]], 9, [[2, 3]]),
        ([[1, 2], [1, 2]], 9, [[1, 2], [1, 2]]),
        ([list(range(90))], 1, [[0, 1, 2, 3]]),
        ([[1], []], 9, []),
    ],
)
def test_unpacked_rows_stay_whole_and_short_ones_are_counted(
    rows: list[list[int]], samples: int, expected: list[list[int]]
) -> None:
    kept, counts = pack_into_fours(rows, samples, pack=False)
    assert kept == expected
    assert (counts.used, counts.too_short) == (len(expected), len(rows) - len(expected))


def test_the_tokenizers_closing_token_is_left_to_the_template() -> None:
    tokenizer = make_tokenizer(adds_eos=True, template=PLAIN_TEMPLATE)
    assert tokenizer("a")["input_ids"] == [0, 7, 1]
    assert render_messages(tokenizer, MESSAGES, "x:1")[0] == WITH_BOS
