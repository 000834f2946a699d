"""Text hashes against a computation with Python's integers, and what they find."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from fp8calib.data.text_hashes import TOKENS_PER_HASH, TextHashes, hash_row, hash_text

ODD = 0x9E3779B97F4A7C15
BITS = (1 << 64) - 1


def mix(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & BITS
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & BITS
    return x ^ (x >> 31)


def hash_run(ids: Sequence[int]) -> int:
    total = len(ids)
    for token in ids:
        total = (total * ODD + mix((token + ODD) & BITS)) & BITS
    return mix(total)


def expected_hashes(ids: Sequence[int]) -> list[int]:
    width = min(TOKENS_PER_HASH, len(ids))
    runs = [hash_run(ids[start : start + width]) for start in range(len(ids) - width + 1)]
    chosen = {run for index, run in enumerate(runs) if index == 0 or run % 32 == 0}
    return sorted(run - (1 << 64) if run >> 63 else run for run in chosen)


def draw(seed: int, count: int) -> list[int]:
    source = random.Random(seed)  # noqa: S311 -- no secret
    return [source.randrange(50_000) for _ in range(count)]


def shared(one: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> float:
    """Give the share of the hashes of `other` that are in `one`."""
    seen = hash_text(one).hashes
    return float(torch.isin(hash_text(other).hashes, seen).double().mean())


@pytest.mark.parametrize("count", [1, 2, 31, 32, 33, 500])
def test_the_hashes_are_those_of_the_formula(count: int) -> None:
    ids = draw(count, count)
    assert hash_row(ids).tolist() == expected_hashes(ids)


def test_one_run_in_thirty_two_is_kept() -> None:
    assert 2700 < len(hash_row(draw(0, 100_000))) < 3550


def test_a_text_is_found_again_in_another_order() -> None:
    rows = [draw(seed, 50 + seed) for seed in range(20)]
    assert shared(rows, rows[::-1]) == 1.0


@pytest.mark.parametrize("length", [32, 40, 512])
def test_a_row_that_begins_another_is_found_for_certain(length: int) -> None:
    rows = [draw(seed, 600) for seed in range(10)]
    assert shared(rows, [ids[:length] for ids in rows]) == 1.0
    assert shared([ids[:length] for ids in rows], rows) > 0


def test_a_text_that_is_cut_elsewhere_is_found() -> None:
    stream = draw(1, 20_000)
    rows = [stream[start : start + 1000] for start in range(0, 20_000, 1000)]
    others = [stream[start : start + 700] for start in range(333, 20_000, 700)]
    assert shared(rows, others) > 0.8


def test_other_texts_share_nothing() -> None:
    assert shared([draw(1, 20_000)], [draw(2, 20_000)]) == 0


def test_short_rows_are_compared_whole() -> None:
    assert shared([[1, 2, 3]], [[1, 2, 3]]) == 1
    assert shared([[1, 2, 3]], [[1, 2, 3, 4]]) == 0


def test_the_hashes_of_two_texts_together_are_the_union() -> None:
    one, two = [draw(1, 500), draw(2, 90)], [draw(2, 90), draw(3, 10)]
    both = torch.cat([hash_text(one).hashes, hash_text(two).hashes]).unique()
    assert torch.equal(hash_text([*one, *two]).hashes, both)
    assert both.dtype is torch.int64


def test_rows_are_counted_and_empty_ones_passed_over() -> None:
    found = hash_text([[1], [], [2, 3], [1]])
    counts = dict(zip(found.hashes.tolist(), found.num_rows.tolist(), strict=True))
    assert counts == {expected_hashes([1])[0]: 2, expected_hashes([2, 3])[0]: 1}
    assert hash_text([[]]).hashes.tolist() == []
    assert hash_text([]).distinctive().tolist() == []


@pytest.mark.parametrize(
    ("num_rows", "kept"),
    [
        ([1, 2, 3], [0, 1]),
        ([3, 3], [0, 1]),  # nothing would be left
        ([1, 5, 6, 50], [0, 1]),
        ([], []),
    ],
)
def test_what_many_rows_share_tells_nothing(num_rows: list[int], kept: list[int]) -> None:
    hashes = torch.arange(len(num_rows))
    text = TextHashes(hashes, torch.tensor(num_rows, dtype=torch.int64))
    assert text.distinctive().tolist() == kept


def test_a_prompt_before_every_row_is_no_overlap() -> None:
    prompt = draw(0, 64)
    calibration = [prompt + draw(seed, 100) for seed in range(1, 30)]
    verification = [prompt + draw(seed, 100) for seed in range(101, 130)]
    text = hash_text(verification).distinctive()
    assert not torch.isin(text, hash_text(calibration).hashes).any()
