"""Estimates of the KL divergence from what a server says about a few tokens at each position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fp8calib.verification.compare.summary import standard_error

_LEAST = 1e-12
"""Probability of the tokens that a server does not name; rounding may leave less."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over tokens, in nats."""

    value: float
    error: float | None
    """Its standard error; None if unknown."""
    covered: float | None = None
    """The unquantized model's probability of the tokens that the server names, on average."""


def estimate_from_top(watched: torch.Tensor, top: torch.Tensor, lengths: Sequence[int]) -> Estimate:
    """Give a lower bound of KL(reference || server) from the K most likely tokens of the server.

    All other tokens count as one. Merging outcomes never raises a KL divergence (the data
    processing inequality), so this is a bound at every position, whatever the text.

    `watched` [N, K + 1] holds the reference's log-probabilities of these tokens, and in its last
    column the largest one; `top` [N, K] those of the server.
    """
    values, covered = _merge_rest(watched[:, :-1].double(), top.double())
    return Estimate(
        value=float(values.mean()),
        error=standard_error(values, lengths),
        covered=float(covered.mean()),
    )


def _merge_rest(reference: torch.Tensor, server: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the divergence over K tokens and the rest, and the reference's share of the K."""
    p, q = reference.exp(), server.exp()
    covered = p.sum(1)
    rest_p, rest_q = (1 - covered).clamp(min=0), (1 - q.sum(1)).clamp(min=_LEAST)
    named = (p * (reference - server)).sum(1)
    rest = rest_p * (rest_p.clamp(min=_LEAST) / rest_q).log()
    return named + rest, covered
