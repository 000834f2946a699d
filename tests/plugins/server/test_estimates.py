"""Estimates of the KL divergence against the divergence itself, summed over a small vocabulary."""

from __future__ import annotations

import math

import pytest
import torch

from fp8calib.plugins.server.estimates import TopTokens, WrittenText, low_variance

VOCABULARY = 12
POSITIONS = 7


@pytest.fixture(scope="module")
def both() -> tuple[torch.Tensor, torch.Tensor]:
    """Give p and q of every token at a few positions, as log-probabilities."""
    generator = torch.Generator().manual_seed(3)
    p = torch.randn(POSITIONS, VOCABULARY, generator=generator).double() * 2
    q = p + torch.randn(POSITIONS, VOCABULARY, generator=generator).double() * 0.7
    return p.log_softmax(1), q.log_softmax(1)


def exact(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Give KL(p || q) of every position."""
    return (p.exp() * (p - q)).sum(1)


def top_tokens(p: torch.Tensor, q: torch.Tensor, num: int, sent: int) -> TopTokens:
    """Give what is known where a server names its `num` most likely tokens, and `sent` came."""
    ids = q.topk(num, 1).indices
    return TopTokens(p=p.gather(1, ids), q=q.gather(1, ids), has_sent=(ids == sent).any(1))


def test_both_estimates_have_the_divergence_as_their_mean(
    both: tuple[torch.Tensor, torch.Tensor],
) -> None:
    p, q = both
    assert (p.exp() * low_variance(p, q)).sum(1) == pytest.approx(exact(p, q).numpy())
    assert low_variance(p, q).min() >= 0


@pytest.mark.parametrize("num", [1, 3, 11])
def test_the_bound_is_below_and_the_corrected_estimate_has_the_right_mean(
    both: tuple[torch.Tensor, torch.Tensor], num: int
) -> None:
    p, q = both
    mean = torch.zeros(POSITIONS).double()
    for sent in range(VOCABULARY):
        top = top_tokens(p, q, num, sent)
        assert (top.merged() <= exact(p, q) + 1e-12).all()
        mean += p[:, sent].exp() * top.corrected(p[:, sent], q[:, sent])
    assert mean == pytest.approx(exact(p, q).numpy(), abs=1e-9)


def test_the_bound_by_hand() -> None:
    """P = (1/2, 1/4, 1/4), q = (1/4, 1/2, 1/4); q's first token is named, the others are one."""
    p, q = torch.tensor([[0.25]]).log().double(), torch.tensor([[0.5]]).log().double()
    top = TopTokens(p=p, q=q, has_sent=torch.tensor([True]))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert top.merged().item() == pytest.approx(expected)
    assert top.covered == pytest.approx(0.25)


def test_a_token_that_only_one_server_names_counts_among_the_others() -> None:
    """Of two tokens that q names, p's probability of the second is unknown."""
    p = torch.tensor([[0.25, 0.0]]).log().double()
    q = torch.tensor([[0.5, 0.125]]).log().double()
    top = TopTokens(p=p, q=q, has_sent=torch.tensor([False]))
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert top.merged().item() == pytest.approx(expected)


def test_only_written_tokens_count() -> None:
    """Sequences of 4 and 3 tokens, of which 2 were given: tokens 3, 4 and 3 were written."""
    written = WrittenText(lengths=[4, 3], num_given=2)
    found = written.mean(torch.tensor([9.0, 1.0, 2.0, 9.0, 6.0]).double())
    assert found.value == pytest.approx(3.0)
    residuals = [1 + 2 - 2 * 3.0, 6 - 3.0]
    assert found.se == pytest.approx(math.sqrt(2 * sum(r * r for r in residuals)) / 3)
