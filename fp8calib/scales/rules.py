"""Rules that choose the magnitude that the largest FP8 value represents, instead of the amax.

A rule is applied to the stats file, not during the run. It applies to activations: K, V, the inputs
of linears, and q if the rule needs no histogram. Weights are known exactly and always use their
amax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from math import inf

import numpy as np
import torch

from fp8calib.errors import UsageError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.stats.histogram import LOWEST_OCTAVE
from fp8calib.stats.histogram_estimates import Spread, spread_counts

MOST_HEADROOM = 1024.0
"""More would leave e4m3fn fewer than five of its fifteen octaves of normal values."""
_CANDIDATES_PER_OCTAVE = 16
_SEARCHED_OCTAVES = 16
"""A value 2**16 times a typical one outweighs all that clipping it can save on 2**32 of those."""


class RuleKind(StrEnum):
    """The names of the rules."""

    AMAX = "amax"
    """The amax itself."""
    PERCENTILE = "percentile"
    """The magnitude below which the given percentage of the histogram's values lies."""
    MSE = "mse"
    """The magnitude with the smallest expected squared error over the histogram."""
    HEADROOM = "headroom"
    """The amax times the given factor."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its number: the percentage or the factor; 0 for rules without a number."""

    kind: RuleKind
    number: float = 0.0

    def __str__(self) -> str:
        if self.kind not in _NUMBER_RANGES:
            return str(self.kind)
        return f"{self.kind}:{repr(self.number).removesuffix('.0')}"


AMAX = Rule(RuleKind.AMAX)
_NUMBER_RANGES: dict[RuleKind, tuple[str, Callable[[float], bool]]] = {
    RuleKind.PERCENTILE: ("0 < P <= 100", lambda percent: 0 < percent <= 100),
    RuleKind.HEADROOM: ("1 <= H <= 1024", lambda factor: 1 <= factor <= MOST_HEADROOM),
}
KNOWN_RULES = "amax, percentile:P (0 < P <= 100), mse, headroom:H (1 <= H <= 1024)"


def parse_rule(text: str) -> Rule:
    """Read `amax`, `percentile:99.9`, `mse` or `headroom:1.5`.

    Raises:
        UsageError: the rule is unknown or its number is invalid; the message lists all rules.
    """
    name, colon, number = text.partition(":")
    if name not in {str(kind) for kind in RuleKind}:
        raise _refusal(f"unknown rule {text!r}")
    kind = RuleKind(name)
    if kind not in _NUMBER_RANGES:
        if colon:
            raise _refusal(f"rule {text!r}: {name} takes no number")
        return Rule(kind)
    return Rule(kind, _parse_number(kind, text, number))


def _parse_number(kind: RuleKind, text: str, number: str) -> float:
    wanted, is_valid = _NUMBER_RANGES[kind]
    try:
        value = float(number)
    except ValueError:
        raise _refusal(f"rule {text!r}: needs a number, {wanted}") from None
    if not is_valid(value):
        raise _refusal(f"rule {text!r}: its number is not in {wanted}")
    return value


def _refusal(message: str) -> UsageError:
    return UsageError(
        f"{message}; known: {KNOWN_RULES}", hint="percentile:99.9 and headroom:1.5 are examples"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipRange:
    """How a rule changes each amax of one site: of the tensor, its heads or its channels."""

    limit: float = inf
    """Magnitudes beyond this are clipped."""
    factor: float = 1.0
    kept_amax: str = ""
    """Why the rule could not be applied and the amax is used; empty if it was applied."""

    def apply(self, amax: torch.Tensor) -> torch.Tensor:
        """Give the magnitudes that fmt.max represents, in the shape and dtype of `amax`."""
        largest = torch.finfo(amax.dtype).max
        return (amax.clamp(max=self.limit) * self.factor).clamp(max=largest)


def find_clip_range(
    rule: Rule, *, amax: float, histogram: torch.Tensor | None, fmt: Fp8Format
) -> ClipRange:
    """Find the clip range of a site whose largest magnitude is `amax`.

    A limit from a histogram applies to the whole site: heads and ranks with a smaller amax keep
    theirs. Histograms are sampled: of the values they miss only the amax is known, and it counts as
    one value. `percentile:100` is the amax exactly.
    """
    if rule.kind is RuleKind.HEADROOM:
        return ClipRange(factor=rule.number)
    if rule.kind is RuleKind.AMAX or rule == Rule(RuleKind.PERCENTILE, 100) or not amax > 0:
        return ClipRange()
    if histogram is None or not int(histogram.sum()):
        return ClipRange(kept_amax=f"{rule} needs a histogram, which is missing: amax is used")
    spread = spread_counts(histogram, amax=amax)
    if rule.kind is RuleKind.MSE:
        limit = _least_error(spread, amax, fmt)
    else:
        limit = spread.quantile(rule.number / 100)
    if not limit:
        kind_of_values = f"values that are zero or under 2**{LOWEST_OCTAVE}"
        return ClipRange(kept_amax=f"{rule} finds only {kind_of_values}: amax is used")
    return ClipRange(limit=min(limit, amax))


def _least_error(spread: Spread, amax: float, fmt: Fp8Format) -> float:
    """Find the magnitude up to `amax` with the least squared error; the largest of equal ones.

    0.0 if only zeros were counted, for which every magnitude is right.
    """
    if not spread.counts.any():
        return 0.0
    steps = np.arange(_SEARCHED_OCTAVES * _CANDIDATES_PER_OCTAVE)
    candidates = amax * 2.0 ** (-steps / _CANDIDATES_PER_OCTAVE)
    errors = spread.squared_errors(candidates / fmt.max, fmt)
    return float(candidates[errors.argmin()])
