"""Summaries of token scores against numpy, a bootstrap over sequences, and numbers by hand."""

from __future__ import annotations

import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fp8calib.verification.judge.gates import GATES, judge
from fp8calib.verification.report import Verdict
from fp8calib.verification.summary import (
    compute_ppl,
    standard_error,
    summarize,
    summarize_positions,
)
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
    candidate = make_scores([math.log(1 / 4), math.log(1 / 16)])
    summary = summarize(candidate, reference, [3])
    assert compute_ppl(reference.logprobs) == pytest.approx(4.0)
    assert summary.ppl == pytest.approx(8.0)
    assert summary.ppl_ratio == pytest.approx(2.0)
    assert summary.log_ratio_se is None  # two equal losses say nothing about an error


def test_the_standard_error_by_hand() -> None:
    """Two sequences of 1 and 3 losses; mean 1.5; residuals -0.5 and 0.5; sqrt(2 * 0.5) / 4."""
    losses = torch.tensor([1.0, 1.0, 2.0, 2.0]).double()
    assert standard_error(losses, [2, 4]) == pytest.approx(math.sqrt(2 * 0.5) / 4)


def test_the_error_of_one_sequence_is_that_of_its_blocks() -> None:
    """Two blocks, 1 2 and 4 9; mean 4; residuals -5 and 5; sqrt(2 * 50) / 4."""
    losses = torch.tensor([1.0, 2.0, 4.0, 9.0]).double()
    assert standard_error(losses, [5]) == pytest.approx(2.5)
    assert standard_error(losses[:2], [3]) == pytest.approx(math.sqrt(2 * 0.5) / 2)


def test_blocks_find_the_error_of_tokens_that_go_together() -> None:
    """Losses wander slowly; of 2000 such sequences the means spread as each one's blocks say."""
    generator = np.random.default_rng(0)
    steps = generator.normal(size=(2000, 920))
    losses = np.array([np.convolve(row, np.ones(21), "valid") for row in steps])
    found = [standard_error(torch.from_numpy(row), [901]) for row in losses[:200]]
    assert np.mean([error or 0.0 for error in found]) == pytest.approx(
        losses.mean(1).std(), rel=0.3
    )
    by_token = losses.std(1).mean() / math.sqrt(900)
    assert by_token < losses.mean(1).std() / 3


@pytest.mark.parametrize(
    ("losses", "lengths"), [([0.5], [2]), ([0.0], [2]), ([0.5] * 6, [4, 4]), ([0.5] * 6, [7])]
)
def test_an_error_that_nobody_can_know_is_not_zero(losses: list[float], lengths: list[int]) -> None:
    """Of one token, or of the same sequence twice."""
    assert standard_error(torch.tensor(losses).double(), lengths) is None
    summary = summarize(
        make_scores([-1 - x for x in losses]), make_scores([-1.0] * len(losses)), lengths
    )
    assert summary.ppl_ratio_se is None
    for gate in GATES.values():
        verdict, why = judge(summary, gate)
        assert verdict is Verdict.CANNOT_TELL
        assert "whose error is unknown" in why


def test_equal_lengths_give_the_error_of_the_sequences_means() -> None:
    """The textbook case: the standard deviation of the means over the root of their number."""
    losses = np.random.default_rng(3).normal(size=(30, 7))
    expected = losses.mean(1).std(ddof=1) / math.sqrt(30)
    found = standard_error(torch.from_numpy(losses.flatten()), [8] * 30)
    assert found == pytest.approx(expected, rel=1e-9)


def test_the_error_is_what_a_bootstrap_over_sequences_finds() -> None:
    """Lengths differ, and tokens of a sequence go together; resampling tokens finds less."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(5, 60, size=80)
    parts = [
        0.3 * generator.normal() + 0.5 * generator.normal(size=length - 1) for length in lengths
    ]
    losses = np.concatenate(parts)
    sums = np.array([part.sum() for part in parts])
    counts = lengths - 1
    picks = generator.integers(0, 80, size=(20000, 80))
    means = sums[picks].sum(1) / counts[picks].sum(1)
    found = standard_error(torch.from_numpy(losses), lengths.tolist())
    assert found == pytest.approx(means.std(), rel=0.03)
    assert found > 2 * losses.std() / math.sqrt(len(losses))


def test_the_error_of_the_ratio_is_that_of_its_logarithm_times_the_ratio() -> None:
    """The delta method, against a bootstrap of the ratio itself."""
    generator = np.random.default_rng(1)
    parts = [0.02 * generator.normal(size=20) + 0.01 * generator.normal() for _ in range(60)]
    reference = generator.normal(size=1200) - 5
    candidate = reference - np.concatenate(parts) - 0.1
    summary = summarize(make_scores(candidate), make_scores(reference), [21] * 60)
    means = np.array([part.mean() for part in parts]) + 0.1
    picks = generator.integers(0, 60, size=(20000, 60))
    ratios = np.exp(means[picks].mean(1))
    assert summary.ppl_ratio == pytest.approx(math.exp(means.mean()), rel=1e-6)
    assert summary.ppl_ratio_se == pytest.approx(ratios.std(), rel=0.03)


def test_the_error_is_paired() -> None:
    """What both models find hard cancels out."""
    reference = np.random.default_rng(2).normal(size=400) * 5
    summary = summarize(make_scores(reference - 0.1), make_scores(reference), [11] * 40)
    assert summary.log_ratio == pytest.approx(0.1, rel=1e-4)
    assert summary.log_ratio_se < 1e-6


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


def test_agreement_and_ties_are_shares() -> None:
    agrees, ties = [True, False, False, False], [False, True, True, False]
    scores = make_scores([-1.0] * 4, agrees=agrees, ties=ties)
    summary = summarize(scores, make_scores([-1.0] * 4), [5])
    assert (summary.top1_agreement, summary.top1_ties) == (0.25, 0.5)


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


@pytest.mark.parametrize("lengths", [[2], [2, 2], [4097], [17, 300, 5]])
def test_every_token_is_in_one_range_of_positions(lengths: list[int]) -> None:
    total = sum(lengths) - len(lengths)
    logprobs = torch.full((total,), -1.0)
    found = summarize_positions(logprobs, logprobs, lengths)
    assert sum(row.tokens for row in found) == total
    assert found[0].first == 1
    assert found[-1].last == max(lengths) - 1
    for before, after in pairwise(found):
        assert after.first == before.last + 1 == 2 * before.first
