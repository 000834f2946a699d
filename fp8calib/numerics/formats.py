"""The FP8 formats as data.

Every number derives from exponent width, mantissa width, bias and the rule for special values
(OCP 8-bit Floating Point Specification 1.0; the FNUZ variants: Noune et al., arXiv:2206.02915).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32, so that 1 / scale is finite."""
SMALLEST_EXPONENT = 2.0**-127
"""The smallest scale that is stored as an exponent (E8M0)."""
MOST_CLIPPED = 0.01
"""A rule may clip a few values on purpose; where a scale clips a larger share it is too small."""


Specials = Literal["ieee", "top-code", "negative-zero"]
"""Which codes of a format are infinities and NaNs.

`ieee`: the largest exponent holds infinity and NaN (e5m2). `top-code`: only the all-ones code is
NaN, there is no infinity (e4m3fn). `negative-zero`: only its code is NaN (the FNUZ formats).
"""
Rounding = Literal["nearest-even", "toward-zero"]
"""Which of its two representable neighbours a value becomes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Format:
    """An 8-bit binary float: one sign bit, `exponent_bits`, `mantissa_bits`."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials

    @property
    def dtype_name(self) -> str:
        """The name of torch's dtype: `float8_e4m3fn`."""
        return f"float8_{self.name}"

    @property
    def max(self) -> float:
        """The largest finite value."""
        exponent = 2**self.exponent_bits - 1
        mantissa = 2**self.mantissa_bits - 1
        if self.specials == "ieee":
            exponent -= 1
        elif self.specials == "top-code":
            mantissa -= 1
        return float(2.0 ** (exponent - self.bias) * (1 + mantissa * 2.0**-self.mantissa_bits))

    @property
    def overflow(self) -> float:
        """The largest fp32 magnitude that still rounds to `max` (to nearest, ties to even)."""
        exponent = math.frexp(self.max)[1] - 1
        tie = self.max + math.ldexp(1.0, exponent - self.mantissa_bits - 1)
        is_even = self.specials == "top-code"  # its top mantissa is one short of all ones
        return tie if is_even else tie - math.ldexp(1.0, exponent - 23)

    @property
    def smallest_normal(self) -> float:
        """The smallest value with a full mantissa."""
        return float(2.0 ** (1 - self.bias))

    @property
    def smallest_subnormal(self) -> float:
        """The smallest value above zero."""
        return float(2.0 ** (1 - self.bias - self.mantissa_bits))

    def value_of(self, code: int) -> float:
        """Decode one code, 0 to 255, as the standard defines it."""
        sign = -1.0 if code & 0x80 else 1.0
        exponent = (code & 0x7F) >> self.mantissa_bits
        fraction = math.ldexp(code & ((1 << self.mantissa_bits) - 1), -self.mantissa_bits)
        infinity = ((1 << self.exponent_bits) - 1) << self.mantissa_bits
        is_nan = {
            "negative-zero": code == 0x80,
            "top-code": code & 0x7F == 0x7F,
            "ieee": code & 0x7F > infinity,
        }
        if is_nan[self.specials]:
            return math.nan
        if self.specials == "ieee" and exponent == (1 << self.exponent_bits) - 1:
            return sign * math.inf
        if exponent == 0:
            return sign * fraction * self.smallest_normal
        return sign * math.ldexp(1 + fraction, exponent - self.bias)


E4M3FN = Fp8Format(name="e4m3fn", exponent_bits=4, mantissa_bits=3, bias=7, specials="top-code")
E4M3FNUZ = Fp8Format(
    name="e4m3fnuz", exponent_bits=4, mantissa_bits=3, bias=8, specials="negative-zero"
)
E5M2 = Fp8Format(name="e5m2", exponent_bits=5, mantissa_bits=2, bias=15, specials="ieee")
E5M2FNUZ = Fp8Format(
    name="e5m2fnuz", exponent_bits=5, mantissa_bits=2, bias=16, specials="negative-zero"
)
"""No scales are made for it; a checkpoint may store numbers in it."""

FP8_FORMATS = {fmt.name: fmt for fmt in (E4M3FN, E4M3FNUZ, E5M2)}
KV_FORMATS = {fmt.name: fmt for fmt in (E4M3FN, E4M3FNUZ)}
"""What KV caches are quantized to."""
NVFP4_CACHE = "nvfp4"
"""The type of a KV cache whose global scales are written as those of an FP8 cache: amax / 448.

For TRT-LLM's kernel on B200 FlashInfer keeps the scales of blocks at 448 / 6 or less, so that a
code times its scale fits E4M3 (0.7.2, quantization/fp4_quantization.py
nvfp4_quantize_paged_kv_cache, read), and SGLang says that it expects amax / 448
(srt/layers/quantization/fp4_kv_cache_quant_method.py, read). ModelOpt 0.47 writes so
(torch/export/unified_export_hf.py kv_cache_max_bound, read). With amax / 2688 other kernels would
lose less.
"""
