"""Rules that choose the magnitude that the largest FP8 value represents, instead of the amax.

A rule is applied to the stats file, not during the run. It applies to activations: K, V, the inputs
of linears, and q if the rule needs no histogram. Weights are known exactly and always use their
amax.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal, get_args

from fp8calib.errors import UsageError, suggest

MOST_HEADROOM = 1024.0
"""More would leave e4m3fn fewer than five of its fifteen octaves of normal values."""


Fallback = Literal["layer-max", "one", "refuse"]
"""What a site gets as its scale if its amax is zero or no token reached it.

`layer-max`: the largest scale of the same role in the layer, or 1.0 if there is none. `one`: 1.0.
`refuse`: no scale, an error names the sites.
"""
RuleKind = Literal["amax", "percentile", "mse", "headroom", "1.0"]
"""The names of the rules.

`amax`: the amax itself. `percentile`: the magnitude below which the given percentage of the
histogram's values lies. `mse`: the magnitude with the smallest expected squared error over the
histogram. `headroom`: the amax times the given factor. `1.0`: what makes the scale of K, V and
inputs 1.0; that of q stays.
"""


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule and its number: the percentage or the factor; 0 for rules without a number."""

    kind: RuleKind
    number: float = 0.0

    def __str__(self) -> str:
        if self.kind not in _NUMBER_RANGES:
            return self.kind
        return f"{self.kind}:{repr(self.number).removesuffix('.0')}"


AMAX = Rule("amax")
ONE = Rule("1.0")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRules:
    """How the statistics of activations become scales."""

    rule: Rule = AMAX
    rules: Mapping[str, Rule] = field(default_factory=dict)
    """Other rules of some K and V, by pattern."""
    fallback: Fallback | None = None


PLAIN_RULES = ScaleRules()

_NUMBER_RANGES = {
    "percentile": ("0 < P <= 100", math.ulp(0.0), 100.0),
    "headroom": ("1 <= H <= 1024", 1.0, MOST_HEADROOM),
}
"""By kind that takes a number: its range in words, its least and its largest value."""
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
    kinds: dict[str, RuleKind] = {kind: kind for kind in get_args(RuleKind)}
    kind, value = kinds.get(name), 0.0
    fault = f"unknown rule {text!r}" if kind is None else ""
    if kind in _NUMBER_RANGES:
        wanted, least, most = _NUMBER_RANGES[kind]
        with suppress(ValueError):
            value = float(number)
        if not least <= value <= most:
            fault = f"rule {text!r}: needs a number, {wanted}"
    elif kind is not None and colon:
        fault = f"rule {text!r}: {name} takes no number"
    if kind is None or fault:
        like = "" if kind else suggest(name, kinds)
        examples = "percentile:99.9 and headroom:1.5 are examples"
        raise UsageError(f"{fault}; known: {KNOWN_RULES}", hint=f"{like} {examples}".strip())
    return Rule(kind, value)
