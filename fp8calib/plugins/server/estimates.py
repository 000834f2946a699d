"""Estimates of the KL divergence from log-probabilities of a few tokens at each position.

p is the unquantized model, q the server. On text that p wrote itself (x drawn from p), the mean of
log p(x) - log q(x) is KL(p || q), and so is that of q(x)/p(x) - 1 - log(q(x)/p(x)): the first two
terms have mean 0, and take most of the variance away. On other text neither is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8calib.plugins.server.result import EstimateResult
from fp8calib.verification.summary import average
from fp8calib.verification.token_scores import select_lengths

_LEAST = 1e-12
"""Probability of the tokens that a server does not name; rounding may leave less."""
_LARGEST_LOG = 300.0
"""The squares of larger ratios exceed fp64."""


def average_written(values: torch.Tensor, lengths: Sequence[int], num_given: int) -> EstimateResult:
    """Average values [N] over the tokens that were written; `num_given` begin every sequence."""
    is_own = torch.cat([torch.arange(1, length) for length in lengths]) >= num_given
    value, se = average(values[is_own], select_lengths(is_own, lengths))
    return EstimateResult(value=value, se=se)


def low_variance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Give q/p - 1 - log(q/p) of every token, from log-probabilities."""
    difference = (q - p).double().clamp(max=_LARGEST_LOG)
    return torch.expm1(difference) - difference


@dataclass(frozen=True, slots=True, kw_only=True)
class TopTokens:
    """Log-probabilities of the tokens that a server names at every position."""

    p: torch.Tensor
    """By the unquantized model, minus infinity where unknown: fp64 [N, K]."""
    q: torch.Tensor
    """By the server: fp64 [N, K]."""
    has_sent: torch.Tensor
    """Whether the token of the text is one of them, and known: bool [N]."""

    def merged(self) -> torch.Tensor:
        """Give the divergence at every position if all other tokens count as one: fp64 [N].

        Merging outcomes never raises a KL divergence (the data processing inequality), so this is
        a lower bound, whatever the text.
        """
        p_rest, q_rest = self._rests()
        known = self.p.isfinite()
        p = self.p.exp()
        named = torch.where(known, p * (self.p - self.q), 0.0).sum(1)
        return named + p_rest * (p_rest / q_rest).log()

    def corrected(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """Add what merging hides, estimated on text that p wrote: fp64 [N].

        `p` and `q` are the log-probabilities of the text's tokens. Where the token is one of the
        others, its share of them is compared (`low_variance`).
        """
        p_rest, q_rest = self._rests()
        hidden = low_variance(p.double() - p_rest.log(), q.double() - q_rest.log())
        return self.merged() + torch.where(self.has_sent, 0.0, hidden)

    @property
    def covered(self) -> float:
        """The unquantized model's probability of the named tokens, on average."""
        return float(self.p.exp().sum(1).mean())

    def _rests(self) -> tuple[torch.Tensor, torch.Tensor]:
        known = self.p.isfinite()
        p_rest = 1 - self.p.exp().sum(1)
        q_rest = 1 - torch.where(known, self.q.exp(), 0.0).sum(1)
        return p_rest.clamp(min=_LEAST), q_rest.clamp(min=_LEAST)
