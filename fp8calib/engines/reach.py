"""What the largest value of a tensor may be, whether a scale fits it, and what it looks like."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import TypeVar

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.model.shapes import KV_ROLES, Role, Site
from fp8calib.numerics.formats import E4M3FN, E5M2, Fp8Format
from fp8calib.numerics.histogram_estimates import MOST_CLIPPED, clipped_share

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


_MOST_HEADROOM = 16.0
"""How far above the statistics a scale may be: other text and headroom give less."""
_MOST_CLIPPING = 64.0
"""How far below it may be, because rules like `percentile` clip outliers; see `MOST_CLIPPED`."""
_MOST_UNSEEN_CLIPPING = 4.0
"""The same where no histogram tells how many values that clips."""
_WITHIN = 1.5
"""The factor by which scales of other text differ at most from those of the statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The magnitudes that the largest value of a tensor may have."""

    amax: float
    """The likely one."""
    least: float
    most: float
    source: str
    """What says so, as the end of a sentence."""
    within: float = _WITHIN
    """The factor by which `amax` may be off."""
    histogram: torch.Tensor | None = None
    """How many values it has of each magnitude; None where that is unknown."""

    def judge(self, scale: float, fmt: Fp8Format = E4M3FN) -> str:
        """Say what is odd about a scale; empty where nothing is."""
        reach = scale * fmt.max
        text = f"stands for values of up to {reach:,.4g}, but {self.source}"
        if not self.least <= reach <= self.most:
            return text
        if self.histogram is None or reach >= self.amax:
            return ""
        share = clipped_share(self.histogram, scale, fmt, amax=self.amax)
        return f"{text}, and {share:.1%} of the values clip" if share > MOST_CLIPPED else ""


def find_odd(
    scales: Mapping[Key, float], reaches: Mapping[Key, Reach], fmt: Fp8Format = E4M3FN
) -> dict[Key, str]:
    """Say what is odd about the scales of one group, and what they look like.

    Args:
        scales: those of K, of weights or others of one kind.
        reaches: what is known of their tensors; other scales are not judged.
        fmt: the format that the scales are for.
    """
    texts = {key: reach.judge(scales[key], fmt) for key, reach in reaches.items()}
    odd = {key: reaches[key] for key, text in texts.items() if text}
    mistakes = explain(
        {key: scales[key] for key in odd},
        {key: reach.amax for key, reach in odd.items()},
        within=max((reach.within for reach in odd.values()), default=1),
        fmt=fmt,
    )
    found = {}
    for key, reach in odd.items():
        ratio = scales[key] * fmt.max / reach.amax
        size = "large" if ratio > 1 else "small"
        factor = f"about {max(ratio, 1 / ratio):,.3g} times too {size}"
        found[key] = f"{texts[key]}: {mistakes[key] or factor}"
    return found


def measure_reaches(stats: CalibrationStats) -> dict[tuple[int, Role], Reach]:
    """Give what calibration saw of K and V, by layer and role; not every layer was seen."""
    found = {}
    for layer, attention in stats.geometry.attentions():
        owner = stats.geometry.producer_of(attention)
        for role in KV_ROLES:
            if (reach := measure_reach(stats, owner.site(role))) is not None:
                found[layer.index, role] = reach
    return found


def measure_reach(stats: CalibrationStats, site: Site) -> Reach | None:
    """Give what calibration saw at a site; None where it saw nothing, or only zeros."""
    found = stats.sites.get(site)
    amax = 0.0 if found is None or not found.amax.numel() else float(found.amax.max())
    if found is None or not amax > 0:
        return None
    histogram = found.histogram
    is_counted = histogram is not None and bool(histogram.any())
    return Reach(
        amax=amax,
        least=amax / (_MOST_CLIPPING if is_counted else _MOST_UNSEEN_CLIPPING),
        most=amax * _MOST_HEADROOM,
        source=f"calibration saw up to {amax:,.4g}",
        histogram=histogram if is_counted else None,
    )
