"""Rules that choose the magnitude that the largest FP8 value represents, instead of the amax.

A rule is applied to the stats file, not during the run. It applies to activations: K, V, the inputs
of linears, and q if the rule needs no histogram. Weights are known exactly and always use their
amax.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from fp8calib.errors import UsageError, suggest

MOST_HEADROOM = 1024.0
"""More would leave e4m3fn fewer than five of its fifteen octaves of normal values."""


class Fallback(StrEnum):
    """What a site gets as its scale if its amax is zero or no token reached it."""

    LAYER_MAX = "layer-max"
    """The largest scale of the same role in the layer, or 1.0 if there is none."""
    ONE = "one"
    """1.0."""
    REFUSE = "refuse"
    """No scale: an error names the sites."""


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
    ONE = "1.0"
    """What makes the scale of K, V and inputs 1.0; that of q stays."""


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
ONE = Rule(RuleKind.ONE)


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """How the statistics of activations become scales."""

    rule: Rule = AMAX
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Other rules of some K and V, by pattern."""
    fallback: Fallback | None = None


_NUMBER_RANGES: dict[RuleKind, tuple[str, Callable[[float], bool]]] = {
    RuleKind.PERCENTILE: ("0 < P <= 100", lambda percent: 0 < percent <= 100),
    RuleKind.HEADROOM: ("1 <= H <= 1024", lambda factor: 1 <= factor <= MOST_HEADROOM),
}
KNOWN_RULES = "amax, percentile:P (0 < P <= 100), mse, headroom:H (1 <= H <= 1024), 1.0"


def parse_rule(text: str) -> Rule:
    """Read `amax`, `percentile:99.9`, `mse` or `headroom:1.5`.

    Raises:
        UsageError: the rule is unknown or its number is invalid; the message lists all rules.
    """
    name, colon, number = text.partition(":")
    if name == "auto":
        raise UsageError(
            "rule auto was removed",
            hint="`fp8calib plan MODEL --max-ratio 1.01 --out DIR` writes a recipe with the rule "
            "of each K and V by which the model loses least",
        )
    if name not in {str(kind) for kind in RuleKind}:
        like = suggest(name, [str(kind) for kind in RuleKind])
        raise _refusal(f"unknown rule {text!r}", like)
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


def _refusal(message: str, like: str = "") -> UsageError:
    examples = "percentile:99.9 and headroom:1.5 are examples"
    return UsageError(f"{message}; known: {KNOWN_RULES}", hint=f"{like} {examples}".strip())
