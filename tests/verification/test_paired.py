"""Paired comparisons: against sums by hand, and how often they are wrong on random divergences."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fp8calib.verification.figures import format_kld, format_mean_kld
from fp8calib.verification.paired import MARGIN, compare_paired
from fp8calib.verification.report import (
    PairedAnswer,
    PairedResult,
    format_difference,
)

T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 15: 2.131, 31: 2.040}
"""Two-sided 95 %, from printed tables."""


def compare(mine: np.ndarray, base: np.ndarray, lengths: list[int]) -> PairedResult:
    klds = {"mine": torch.from_numpy(mine).float(), "base": torch.from_numpy(base).float()}
    return compare_paired("mine", "base", klds, lengths)


def test_the_error_is_that_of_the_sums_of_sequences() -> None:
    """Sequences of 1 and 3 tokens: residuals of the sums are -0.5 and 0.5 around a mean of 0.5."""
    found = compare(np.array([1.0, 2.0, 1.0, 2.0]), np.ones(4), [2, 4])
    assert found.difference == 0.5
    assert found.se == pytest.approx(math.sqrt(2 * 0.5) / 4)
    assert found.margin == pytest.approx(MARGIN)


@pytest.mark.parametrize("sequences", [each + 1 for each in T_QUANTILES])
def test_the_interval_is_that_of_students_t(sequences: int) -> None:
    """A difference just inside and just outside of the interval, of one token a sequence."""
    noise = np.linspace(-1, 1, sequences)
    error = math.sqrt((noise**2).sum() / (sequences - 1) / sequences)
    width = T_QUANTILES[sequences - 1] * error
    for factor, answer in ((0.99, PairedAnswer.CANNOT_TELL), (1.01, PairedAnswer.WORSE)):
        base = np.full(sequences, 0.01)
        found = compare(base + noise + width * factor, base, [2] * sequences)
        assert found.se == pytest.approx(error, rel=1e-5)
        assert found.answer is answer
    found = compare(base - noise - width * 1.01, base, [2] * sequences)
    assert found.answer is PairedAnswer.BETTER


def test_a_small_difference_that_is_sure_is_none() -> None:
    """Of a divergence of 1, the margin is 0.1: 0.05 ± 0.001 is inside of it, though not 0."""
    noise = 0.001 * np.repeat([-1.0, 1.0], 50)
    base = np.ones(100)
    assert compare(base + 0.05 + noise, base, [11] * 10).answer is PairedAnswer.NO_DIFFERENCE
    assert compare(base + 0.15 + noise, base, [11] * 10).answer is PairedAnswer.WORSE
    assert compare(base, base, [11] * 10).answer is PairedAnswer.NO_DIFFERENCE
    assert compare(np.zeros(100), np.zeros(100), [11] * 10).answer is PairedAnswer.NO_DIFFERENCE


def test_a_large_difference_of_two_texts_needs_a_third() -> None:
    """By hand: 1 ± 0.1; t is 12.7 for two texts, 4.30 for three, and (4.30 + 0.84) 0.0816 < 1."""
    base = np.ones(20)
    found = compare(base + np.repeat([1.1, 0.9], 10), base, [11, 11])
    assert found.answer is PairedAnswer.CANNOT_TELL
    assert found.se == pytest.approx(0.1)
    assert found.tokens_to_tell == 30


def test_the_same_text_over_and_over_tells_nothing() -> None:
    found = compare(np.full(8, 2.0), np.ones(8), [5, 5])
    assert (found.se, found.answer, found.tokens_to_tell) == (None, PairedAnswer.CANNOT_TELL, None)
    assert format_difference(found) == "+1.0000, error unknown"


def test_one_text_in_twenty_is_wrong_where_there_is_no_difference() -> None:
    """Heavy tails as in real divergences, tokens of a sequence alike; 400 texts of 16 sequences."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(400):
        level = random.lognormal(0, 0.5, (16, 1))
        mine, base = (level * random.lognormal(-5, 1.5, (16, 63)) for _ in range(2))
        found = compare(mine.ravel(), base.ravel(), [64] * 16)
        wrong += found.answer in {PairedAnswer.BETTER, PairedAnswer.WORSE}
    assert wrong <= 400 * 0.08


def test_the_text_that_would_tell_does_tell() -> None:
    """With as many tokens as were asked for, a difference of the margin is told 4 times of 5."""
    random = np.random.default_rng(6)

    def draw(sequences: int, shift: float) -> PairedResult:
        base = random.lognormal(-5, 1.0, (sequences, 63))
        mine = base + random.normal(0, 0.01, base.shape) + shift
        return compare(mine.ravel(), base.ravel(), [64] * sequences)

    first = next(
        f for f in (draw(8, 0.0) for _ in range(50)) if f.answer is PairedAnswer.CANNOT_TELL
    )
    assert first.tokens_to_tell is not None
    asked = round(float(np.median([draw(8, 0.0).tokens_to_tell or 0 for _ in range(50)])) / 63)
    told = [draw(asked, 2 * first.margin).answer is PairedAnswer.WORSE for _ in range(100)]
    assert sum(told) >= 95
    at_margin = [draw(asked, first.margin).answer for _ in range(200)]
    assert 0.65 < sum(each is PairedAnswer.WORSE for each in at_margin) / 200 < 0.95


@pytest.mark.parametrize(
    ("kld", "se", "text"),
    [
        (None, None, "-"),
        (0.0, None, "0.0000"),
        (0.0153, None, "0.0153"),
        (0.0153, 0.0005, "0.0153 ± 0.0005"),
        (0.0153, 0.00002, "0.01530 ± 0.00002"),
        (0.00002, None, "2.00e-05"),
        (0.00002, 0.000003, "2.00e-05 ± 3.0e-06"),
        (7.7, 0.21, "7.7000 ± 0.2100"),
        (0.0005, 0.0004, "0.0005 ± 0.0004"),
        (0.0, 0.0, "0.0000 ± 0.0000"),
    ],
)
def test_a_divergence_is_printed_with_its_error(
    kld: float | None, se: float | None, text: str
) -> None:
    assert format_kld(kld, se) == text
    unknown = " ± ?" if kld is not None and se is None else ""
    assert format_mean_kld(kld, se) == text + unknown
