"""Summaries of token scores against numpy, and numbers by hand."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.verification.judge.gates import GATES, judge
from fp8calib.verification.report import PairedResult, Verdict
from fp8calib.verification.summary import (
    compare_paired,
    compute_ppl,
    standard_error,
    summarize,
    summarize_positions,
)
from fp8calib.verification.tables import format_difference, format_kld, format_mean_kld
from fp8calib.verification.token_scores import TokenScores


def make_scores(
    logprobs: list[float] | np.ndarray,
    klds: list[float] | np.ndarray | None = None,
    agrees: list[bool] | None = None,
    ties: list[bool] | None = None,
) -> TokenScores:
    """Wrap numbers."""
    size = len(logprobs)
    return TokenScores(
        logprobs=torch.tensor(np.asarray(logprobs), dtype=torch.float32),
        klds=torch.tensor(np.asarray(klds if klds is not None else [0.0] * size)).float(),
        agrees=torch.tensor(agrees if agrees is not None else [True] * size),
        ties=torch.tensor(ties if ties is not None else [False] * size),
        watched=torch.empty(size, 0),
    )


def test_perplexity_and_its_ratio_by_hand() -> None:
    """Probabilities 1/2, 1/8 give 4; 1/4, 1/16 give 8: twice as much."""
    reference = make_scores([math.log(1 / 2), math.log(1 / 8)])
    agrees, ties = [False, False], [True, False]
    candidate = make_scores([math.log(1 / 4), math.log(1 / 16)], agrees=agrees, ties=ties)
    summary = summarize(candidate, reference, [3])
    assert (summary.top1_agreement, summary.top1_ties) == (0.0, 0.5)
    assert compute_ppl(reference.logprobs) == pytest.approx(4.0)
    assert summary.ppl == pytest.approx(8.0)
    assert summary.ppl_ratio == pytest.approx(2.0)
    assert summary.log_ratio_se is None  # two equal losses say nothing about an error


@pytest.mark.parametrize(
    ("losses", "lengths", "expected"),
    [
        # two sequences of 1 and 3 losses; mean 1.5; residuals -0.5 and 0.5
        ([1.0, 1.0, 2.0, 2.0], [2, 4], math.sqrt(2 * 0.5) / 4),
        # blocks of one sequence, 1 2 and 4 9; mean 4; residuals -5 and 5
        ([1.0, 2.0, 4.0, 9.0], [5], math.sqrt(2 * 50) / 4),
        ([1.0, 2.0], [3], math.sqrt(2 * 0.5) / 2),
    ],
)
def test_the_standard_error_by_hand(
    losses: list[float], lengths: list[int], expected: float
) -> None:
    found = standard_error(torch.tensor(losses).double(), lengths)[0]
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("losses", "lengths"), [([0.5], [2]), ([0.0], [2]), ([0.5] * 6, [4, 4]), ([0.5] * 6, [7])]
)
def test_an_error_that_nobody_can_know_is_not_zero(losses: list[float], lengths: list[int]) -> None:
    """Of one token, or of the same sequence twice."""
    assert standard_error(torch.tensor(losses).double(), lengths)[0] is None
    summary = summarize(
        make_scores([-1 - x for x in losses]), make_scores([-1.0] * len(losses)), lengths
    )
    assert summary.ppl_ratio_se is None
    for gate in GATES.values():
        verdict, why = judge(summary, gate)
        assert verdict is Verdict.CANNOT_TELL
        assert "whose error is unknown" in why


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0, 50, width=32), min_size=1, max_size=300))
def test_quantiles_are_those_of_numpy(klds: list[float]) -> None:
    scores = make_scores([-1.0] * len(klds), klds)
    summary = summarize(scores, make_scores([-1.0] * len(klds)), [len(klds) + 1])
    exact = np.array(klds, dtype=np.float32).astype(np.float64)
    assert summary.kld_mean == pytest.approx(exact.mean())
    assert summary.kld_median == np.quantile(exact, 0.5, method="inverted_cdf")
    assert summary.kld_p99 == np.quantile(exact, 0.99, method="inverted_cdf")
    assert summary.kld_max == exact.max()


def test_sums_of_many_tokens_are_not_lost() -> None:
    """A million losses of 1e-4 on top of log-probabilities of -11: fp32 sums would drift."""
    reference = np.full(1_000_000, -11.0)
    candidate = reference - np.float32(2.0**-13)
    summary = summarize(make_scores(candidate), make_scores(reference), [1001] * 1000)
    assert summary.log_ratio == pytest.approx(2.0**-13, rel=1e-6)
    assert summary.ppl == pytest.approx(math.exp(11 + 2.0**-13), rel=1e-9)


def test_a_perplexity_beyond_all_numbers_is_the_largest_one() -> None:
    summary = summarize(make_scores([-800.0, -798.0]), make_scores([-1.0, -1.0]), [3])
    assert summary.ppl == sys.float_info.max
    assert summary.ppl_ratio == sys.float_info.max
    assert summary.ppl_ratio_se == pytest.approx(sys.float_info.max)
    assert summary.log_ratio == pytest.approx(798.0)


def test_positions_are_split_where_they_double() -> None:
    """Sequences of 6 and 3 tokens: positions 1..5 and 1, 2."""
    losses = [1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0]
    klds = [0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9]
    scores = make_scores([-loss for loss in losses], klds)
    found = summarize_positions(scores.logprobs, torch.zeros(7), [6, 3], scores.klds)
    assert [(row.first, row.last, row.tokens) for row in found] == [(1, 1, 2), (2, 3, 3), (4, 5, 2)]
    assert [row.kld_mean for row in found] == pytest.approx([0.4, 1.4 / 3, 0.45])
    assert [math.log(row.ppl_ratio) for row in found] == pytest.approx([5.5, 25 / 3, 4.5])


# --- paired comparisons --------------------------------------------------------------------------


T_QUANTILES = {1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 7: 2.365, 15: 2.131, 31: 2.040}
"""Two-sided 95 %, from printed tables."""


def compare(mine: np.ndarray, base: np.ndarray, lengths: list[int]) -> PairedResult:
    klds = {"mine": torch.from_numpy(mine).float(), "base": torch.from_numpy(base).float()}
    return compare_paired("mine", "base", klds, lengths)


@pytest.mark.parametrize("sequences", [each + 1 for each in T_QUANTILES])
def test_the_interval_is_that_of_students_t(sequences: int) -> None:
    """A difference just inside and just outside of the interval, of one token a sequence."""
    noise = np.linspace(-1, 1, sequences)
    error = math.sqrt((noise**2).sum() / (sequences - 1) / sequences)
    width = T_QUANTILES[sequences - 1] * error
    for factor, answer in ((0.99, "cannot-tell"), (1.01, "worse")):
        base = np.full(sequences, 0.01)
        found = compare(base + noise + width * factor, base, [2] * sequences)
        assert found.se == pytest.approx(error, rel=1e-5)
        assert found.answer == answer
    found = compare(base - noise - width * 1.01, base, [2] * sequences)
    assert found.answer == "better"


def test_a_small_difference_that_is_sure_is_none() -> None:
    """Of a divergence of 1, the margin is 0.1: 0.05 ± 0.001 is inside of it, though not 0."""
    noise = 0.001 * np.repeat([-1.0, 1.0], 50)
    base = np.ones(100)
    assert compare(base + 0.05 + noise, base, [11] * 10).answer == "no-difference"
    assert compare(base + 0.15 + noise, base, [11] * 10).answer == "worse"
    assert compare(base, base, [11] * 10).answer == "no-difference"
    assert compare(np.zeros(100), np.zeros(100), [11] * 10).answer == "no-difference"


def test_a_large_difference_of_two_texts_needs_a_third() -> None:
    """By hand: 1 ± 0.1; t is 12.7 for two texts, 4.30 for three, and (4.30 + 0.84) 0.0816 < 1."""
    base = np.ones(20)
    found = compare(base + np.repeat([1.1, 0.9], 10), base, [11, 11])
    assert found.answer == "cannot-tell"
    assert found.se == pytest.approx(0.1)
    assert found.tokens_to_tell == 30


def test_the_same_text_over_and_over_tells_nothing() -> None:
    found = compare(np.full(8, 2.0), np.ones(8), [5, 5])
    assert (found.se, found.answer, found.tokens_to_tell) == (None, "cannot-tell", None)
    assert format_difference(found) == "+1.0000, error unknown"


def test_one_text_in_twenty_is_wrong_where_there_is_no_difference() -> None:
    """Heavy tails as in real divergences, tokens of a sequence alike; 400 texts of 16 sequences."""
    random = np.random.default_rng(5)
    wrong = 0
    for _ in range(400):
        level = random.lognormal(0, 0.5, (16, 1))
        mine, base = (level * random.lognormal(-5, 1.5, (16, 63)) for _ in range(2))
        found = compare(mine.ravel(), base.ravel(), [64] * 16)
        wrong += found.answer in {"better", "worse"}
    assert wrong <= 400 * 0.08


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
