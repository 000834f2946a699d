"""Find scales that do not belong among those of the other layers of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import pairwise
from statistics import median

from fp8calib.fp8.formats import E4M3FN

_MOST_FACTOR = 200.0
"""How far from a median a scale may always be. In the models in use the largest K and V of the
layers differ by up to some 100; a reciprocal or a missing division by 448 is further away."""
_MOST_DEVIATIONS = 3.5
"""How many robust standard deviations a scale may be from the median (Iglewicz and Hoaglin)."""
_MAD_TO_DEVIATION = 1.4826
"""A normal distribution's standard deviation, in median absolute deviations."""
_MOST_GAP = 1000.0
"""How large a gap between two neighbours in size may be, however much the scales vary."""
_UNCALIBRATED = 1.0
"""What tools store for a layer that was not calibrated, or that has nothing to calibrate."""


def find_outliers(scales: Mapping[int, float]) -> Mapping[int, str]:
    """Describe the scales that are far from those of the other layers, by layer.

    The logarithms are compared: with the median of all layers, in units of the median absolute
    deviation; with the median of the nearest layers, because V often grows with depth; and by the
    widest gap between two scales in size, which shows a fault of half of the layers. A scale of
    exactly 1.0 is that of a layer without calibration, and is not compared.

    Args:
        scales: those of K or those of V, finite and above zero, by layer.
    """
    logs = {layer: math.log(each) for layer, each in scales.items() if each != _UNCALIBRATED}
    if len(logs) < 2:
        return {}
    middle = median(logs.values())
    spread = median(abs(each - middle) for each in logs.values())
    allowed = max(math.log(_MOST_FACTOR), _MOST_DEVIATIONS * _MAD_TO_DEVIATION * spread)
    found = {layer for layer, each in logs.items() if abs(each - middle) > allowed}
    found |= _find_unlike_nearest(logs)
    found = found or _find_beyond_gap(logs)
    usual = [scales[layer] for layer in logs if layer not in found]
    return {layer: _describe(scales[layer], usual) for layer in sorted(found)}


def _find_unlike_nearest(logs: Mapping[int, float]) -> set[int]:
    """Find the layers that are far from the median of the two layers on either side."""
    layers = sorted(logs)
    found = set()
    for position, layer in enumerate(layers):
        nearest = [*layers[max(0, position - 2) : position], *layers[position + 1 : position + 3]]
        if len(nearest) < 3:
            continue
        if abs(logs[layer] - median(logs[each] for each in nearest)) > math.log(_MOST_FACTOR):
            found.add(layer)
    return found


def _find_beyond_gap(logs: Mapping[int, float]) -> set[int]:
    """Find the layers on the side of the widest gap that has fewer layers, if that is too wide."""
    ranked = sorted(logs, key=lambda layer: logs[layer])
    gaps = [logs[above] - logs[below] for below, above in pairwise(ranked)]
    widest = max(range(len(gaps)), key=lambda index: gaps[index])
    if gaps[widest] <= math.log(_MOST_GAP):
        return set()
    low, high = ranked[: widest + 1], ranked[widest + 1 :]
    return set(low if len(low) < len(high) else high)


def _describe(scale: float, usual: list[float]) -> str:
    middle = math.exp(median(map(math.log, usual)))
    is_larger = scale > middle
    ratio = scale / middle if is_larger else middle / scale
    text = (
        f"({scale:.4g}) is {ratio:,.0f} times {'larger' if is_larger else 'smaller'} than the "
        f"median of the other layers ({middle:.4g})"
    )
    explained = _explain(scale, min(usual), max(usual))
    return f"{text}: {explained}" if explained else text


def _explain(scale: float, least: float, most: float) -> str:
    """Name the usual mistake that explains a scale; empty where none does."""
    if least <= scale / E4M3FN.max <= most:
        return "it looks like amax, not amax / 448"
    if least / 10 <= 1 / scale <= most * 10:
        return "it looks like a reciprocal: 448 / amax, not amax / 448"
    return ""
