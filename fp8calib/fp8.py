"""The 8-bit float formats as data.

Every number derives from exponent width, mantissa width, bias and the rule for special values
(OCP 8-bit Floating Point Specification 1.0; the FNUZ variants: Noune et al., arXiv:2206.02915).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Specials(StrEnum):
    """Which codes a format gives away to infinities and NaNs."""

    IEEE = "ieee"
    """The largest exponent holds infinity and NaN (e5m2)."""
    TOP_CODE = "top-code"
    """Only the all-ones code is NaN, there is no infinity (e4m3fn)."""
    NEGATIVE_ZERO = "negative-zero"
    """Only the code of negative zero is NaN (the FNUZ formats)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """An 8-bit binary float: one sign bit, `exponent_bits`, `mantissa_bits`."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials

    @property
    def max(self) -> float:
        """The largest finite value."""
        exponent = 2**self.exponent_bits - 1
        mantissa = 2**self.mantissa_bits - 1
        if self.specials is Specials.IEEE:
            exponent -= 1
        elif self.specials is Specials.TOP_CODE:
            mantissa -= 1
        return float(2.0 ** (exponent - self.bias) * (1 + mantissa * 2.0**-self.mantissa_bits))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))


E4M3FN = Fp8Format(
    name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, specials=Specials.TOP_CODE
)
E4M3FNUZ = Fp8Format(
    name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, specials=Specials.NEGATIVE_ZERO
)
E5M2 = Fp8Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, specials=Specials.IEEE)

FORMATS = {fmt.name: fmt for fmt in (E4M3FN, E4M3FNUZ, E5M2)}
