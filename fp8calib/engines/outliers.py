"""Find scales that do not belong among those of the other layers of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from fp8calib.engines.reach import explain
from fp8calib.numerics.formats import E4M3FN

_MOST_FACTOR = 200.0
"""How far from a median a scale may always be. In the models in use the largest K and V of the
layers differ by up to some 100; a reciprocal or a missing division by 448 is further away."""
_MOST_DEVIATIONS = 3.5
"""How many robust standard deviations a scale may be from the median (Iglewicz and Hoaglin)."""
_MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""
_MOST_GAP = 5.0
"""How large a gap between two neighbours in size may be, however much the scales vary: so many
times what a scale may differ from a median."""
_WITHIN = 4.0
"""The factor by which a right scale may differ from the others, where a mistake is named."""
_TOLD = "the weights, and the scales of the other layers, suggest"
_UNCALIBRATED = 1.0
"""What tools store for a layer that was not calibrated, or that has nothing to calibrate."""


def find_outliers(
    scales: Mapping[int, float],
    expected: Mapping[int, float] | None = None,
    *,
    most_factor: float = _MOST_FACTOR,
) -> Mapping[int, str]:
    """Describe the scales that are far from those of the other layers, by layer.

    The logarithms are compared: with the median of all layers, in units of the median absolute
    deviation; with the median of the nearest layers, because V often grows with depth; and by the
    widest gap between two scales in size, which shows a fault of half of the layers. A scale of
    exactly 1.0 is that of a layer without calibration, and is not compared.

    Args:
        scales: those of K or those of V, finite and above zero, by layer.
        expected: what else is known of them; only what differs from it is compared.
        most_factor: how far from a median a scale may always be.
    """
    logs = {
        layer: math.log(each / (1 if expected is None else expected[layer]))
        for layer, each in scales.items()
        if each != _UNCALIBRATED
    }
    if len(logs) < 2:
        return {}
    middle = median(logs.values())
    spread = median(abs(each - middle) for each in logs.values())
    most = math.log(most_factor)
    allowed = max(most, _MOST_DEVIATIONS * _MAD_TO_DEVIATION * spread)
    found = {layer for layer, each in logs.items() if abs(each - middle) > allowed}
    found |= _find_unlike_nearest(logs, most)
    found = found or _find_beyond_gap(logs, most + math.log(_MOST_GAP))
    usual = [logs[layer] for layer in logs if layer not in found] or list(logs.values())
    likely = {
        layer: math.exp(median(usual)) * (1 if expected is None else expected[layer])
        for layer in sorted(found)
    }
    mistakes = explain(
        {layer: scales[layer] for layer in likely},
        {layer: each * E4M3FN.max for layer, each in likely.items()},
        within=_WITHIN,
    )
    than = "the median of the other layers" if expected is None else _TOLD
    return {
        layer: _describe(scales[layer], each, than, mistakes[layer])
        for layer, each in likely.items()
    }


def _find_unlike_nearest(logs: Mapping[int, float], most: float) -> set[int]:
    """Find the layers that are far from the median of the two layers on either side."""
    layers = sorted(logs)
    found = set()
    for position, layer in enumerate(layers):
        nearest = [*layers[max(0, position - 2) : position], *layers[position + 1 : position + 3]]
        if len(nearest) < 3:
            continue
        if abs(logs[layer] - median(logs[each] for each in nearest)) > most:
            found.add(layer)
    return found


def _find_beyond_gap(logs: Mapping[int, float], most: float) -> set[int]:
    """Find the layers on the side of the widest gap that has fewer layers, if that is too wide."""
    ranked = sorted(logs, key=lambda layer: logs[layer])
    gaps = [logs[above] - logs[below] for below, above in pairwise(ranked)]
    widest = max(range(len(gaps)), key=lambda index: gaps[index])
    if gaps[widest] <= most:
        return set()
    low, high = ranked[: widest + 1], ranked[widest + 1 :]
    return set(low if len(low) < len(high) else high)


def _describe(scale: float, likely: float, than: str, mistake: str) -> str:
    ratio = max(scale / likely, likely / scale)
    size = "larger" if scale > likely else "smaller"
    text = f"({scale:.4g}) is {ratio:,.0f} times {size} than {than} ({likely:.4g})"
    return f"{text}: {mistake}" if mistake else text
