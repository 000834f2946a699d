"""Name the usual mistake that explains scales which do not fit what their tensors hold."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from statistics import median
from typing import TypeVar

from fp8calib.numerics.formats import E4M3FN, E5M2, Fp8Format

Key = TypeVar("Key", bound=Hashable)

_MISTAKES: Mapping[str, Callable[[float, float], float]] = {
    "it looks like amax, not amax / {0:g}": lambda amax, _: amax,
    "it looks like a reciprocal: {0:g} / amax, not amax / {0:g}": (lambda amax, most: most / amax),
    f"it looks like a scale for E5M2: amax / {E5M2.max:g}, not amax / {{0:g}}": (
        lambda amax, _: amax / E5M2.max
    ),
    "it looks as if it was divided by {0:g} twice": lambda amax, most: amax / most**2,
}
"""What a scale looks like -> the scale that the mistake makes of amax and the largest FP8 value."""


def explain(
    scales: Mapping[Key, float],
    amax: Mapping[Key, float],
    *,
    within: float,
    fmt: Fp8Format = E4M3FN,
) -> dict[Key, str]:
    """Name the mistake behind each of the scales of one group, such as those of K.

    A scale alone may fit two mistakes: with an amax of 21, amax and its reciprocal are the same.
    Hence each scale gets, of those that fit it, the mistake that is nearest to the group.

    Args:
        scales: those that are wrong.
        amax: what each has to reach, exactly or about.
        within: the factor by which what a mistake makes may differ.
        fmt: the format that the scales are for.

    Returns:
        What each looks like; empty where nothing fits.
    """
    if not scales:
        return {}
    errors = {
        text.format(fmt.max): {
            key: abs(math.log(scale / make(amax[key], fmt.max))) for key, scale in scales.items()
        }
        for text, make in _MISTAKES.items()
    }
    nearest = sorted(errors, key=lambda text: median(errors[text].values()))
    return {
        key: next((text for text in nearest if errors[text][key] <= math.log(within)), "")
        for key in scales
    }
