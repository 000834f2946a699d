"""Find scales that are wrong: alone, among those of other layers, or all together.

Each function compares numbers: scales, and what the largest value of their tensors is or may be.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import mean, median
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8calib.model.geometry import KV_ROLES, Role
from fp8calib.numerics.formats import E4M3FN, E5M2, MOST_CLIPPED, Fp8Format

if TYPE_CHECKING:
    import torch

Key = TypeVar("Key", bound=Hashable)
Slot = tuple[int, Role]
"""A layer and K or V."""


# --- a scale beside what its tensor reaches -------------------------------------------------------

_MISTAKES: Mapping[str, Callable[[float, float], float]] = {
    "it looks like amax, not amax / {0:g}": lambda amax, _: amax,
    "it looks like a reciprocal: {0:g} / amax, not amax / {0:g}": (lambda amax, most: most / amax),
    f"it looks like a scale for E5M2: amax / {E5M2.max:g}, not amax / {{0:g}}": (
        lambda amax, _: amax / E5M2.max
    ),
    "it looks as if it was divided by {0:g} twice": lambda amax, most: amax / most**2,
}
"""What a scale looks like -> the scale that the mistake makes of amax and the largest FP8 value."""
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
    """How many values it has of each magnitude; None if that is unknown."""

    def judge(self, scale: float, fmt: Fp8Format = E4M3FN) -> str:
        """Say what is odd about a scale; empty if nothing is."""
        reach = scale * fmt.max
        text = f"stands for values of up to {reach:,.4g}, but {self.source}"
        if not self.least <= reach <= self.most:
            return text
        if self.histogram is None or reach >= self.amax:
            return ""
        # it imports torch
        from fp8calib.numerics.histogram_estimates import clipped_share  # noqa: PLC0415

        share = clipped_share(self.histogram, scale, fmt, amax=self.amax)
        text = f"{text}, and {share:.1%} of the values clip, as its histogram estimates"
        return text if share > MOST_CLIPPED else ""


def find_odd(
    scales: Mapping[Key, float], reaches: Mapping[Key, Reach], fmt: Fp8Format = E4M3FN
) -> dict[Key, str]:
    """Say what is odd about the scales of one kind, and what they look like.

    A scale is judged only if `reaches` has its tensor.
    """
    texts = {key: reach.judge(scales[key], fmt) for key, reach in reaches.items()}
    odd = {key: (scales[key], reaches[key].amax) for key, text in texts.items() if text}
    within = max((reaches[key].within for key in odd), default=_WITHIN)
    mistakes = _explain(odd, within=within, fmt=fmt)
    found = {}
    for key, (scale, amax) in odd.items():
        ratio = scale * fmt.max / amax
        size = "large" if ratio > 1 else "small"
        factor = f"about {max(ratio, 1 / ratio):,.3g} times too {size}"
        found[key] = f"{texts[key]}: {mistakes[key] or factor}"
    return found


def _explain(
    scales: Mapping[Key, tuple[float, float]], *, within: float, fmt: Fp8Format = E4M3FN
) -> dict[Key, str]:
    """Name the mistake behind each of the scales of one group; empty if nothing fits.

    A scale alone may fit two mistakes: with an amax of 21, amax and its reciprocal are the same.
    Hence each scale gets, of those that fit it, the mistake that is nearest to the group. A scale
    has what it has to reach beside it, and `within` is the factor by which that may be off.
    """
    errors = {
        text.format(fmt.max): {
            key: abs(math.log(scale / make(amax, fmt.max))) for key, (scale, amax) in scales.items()
        }
        for text, make in _MISTAKES.items()
    }
    nearest = sorted(errors, key=lambda text: median(errors[text].values())) if scales else []
    return {
        key: next((text for text in nearest if errors[text][key] <= math.log(within)), "")
        for key in scales
    }


# --- a scale among those of the other layers ------------------------------------------------------

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
_WITHIN_OTHERS = 4.0
"""The factor by which a right scale may differ from the others, where a mistake is named."""
UNCALIBRATED = 1.0
"""What tools store for a layer that was not calibrated, or that has nothing to calibrate."""


def find_outliers(
    scales: Mapping[int, float],
    expected: Mapping[int, float] | None = None,
    *,
    most_factor: float = _MOST_FACTOR,
) -> dict[int, str]:
    """Describe the scales that are far from those of the other layers, by layer.

    The logarithms are compared: with the median of all layers, in units of the median absolute
    deviation; with the median of the nearest layers, because V often grows with depth; and by the
    widest gap between two scales in size, which shows a fault of half of the layers. A scale of
    exactly 1.0 is that of a layer without calibration, and is not compared. Where more is
    `expected` of scales, only what differs from it is compared. `most_factor` is how far from a
    median a scale may always be.
    """
    layers = sorted(layer for layer, scale in scales.items() if scale != UNCALIBRATED)
    if len(layers) < 2:
        return {}
    known = np.array([1.0 if expected is None else expected[layer] for layer in layers])
    logs = np.log([scales[layer] for layer in layers]) - np.log(known)
    is_odd = _mark_outliers(logs, math.log(most_factor))
    if not is_odd.any():
        return {}
    usual = np.median(logs if is_odd.all() else logs[~is_odd])
    likely = dict(zip(layers, (np.exp(usual) * known).tolist(), strict=True))
    found = {layer: scales[layer] for layer in np.array(layers)[is_odd].tolist()}
    mistakes = _explain(
        {layer: (scale, likely[layer] * E4M3FN.max) for layer, scale in found.items()},
        within=_WITHIN_OTHERS,
    )
    than = "the median of the other layers"
    if expected is not None:
        than = "the weights, and the scales of the other layers, suggest"
    texts = {}
    for layer, scale in found.items():
        ratio = max(scale / likely[layer], likely[layer] / scale)
        size = "larger" if scale > likely[layer] else "smaller"
        text = f"({scale:.4g}) is {ratio:,.0f} times {size} than {than} ({likely[layer]:.4g})"
        texts[layer] = f"{text}: {mistakes[layer]}" if mistakes[layer] else text
    return texts


def _mark_outliers(logs: NDArray[np.float64], most: float) -> NDArray[np.bool_]:
    """Mark what is farther than `most` from the others, in three ways (see `find_outliers`)."""
    distances = np.abs(logs - np.median(logs))
    allowed = max(most, _MOST_DEVIATIONS * _MAD_TO_DEVIATION * np.median(distances))
    is_odd: NDArray[np.bool_] = distances > allowed
    for place, log in enumerate(logs):
        nearest = [*logs[max(0, place - 2) : place], *logs[place + 1 : place + 3]]
        is_odd[place] |= len(nearest) >= 3 and abs(log - np.median(nearest)) > most
    ranked = np.argsort(logs, kind="stable")
    gaps = np.diff(logs[ranked])
    widest = int(gaps.argmax())
    if not is_odd.any() and gaps[widest] > most + math.log(_MOST_GAP):
        low, high = np.split(ranked, [widest + 1])
        is_odd[low if len(low) < len(high) else high] = True
    return is_odd


# --- scales that are wrong together ---------------------------------------------------------------

_LEAST_MISFIT = math.log(1.1)
"""How far scales have to be from their own places on average; other text gives less."""
_LEAST_GAIN = 2.0
"""How many times better they have to fit the other places."""
_MOST_MISFIT = math.log(1.5)
"""How far they may be from the other places on average."""
_MOST_SHARED = math.log(64.0)
"""The factor that all of them may share, of headroom or clipping; reciprocals are farther off."""
_LEAST_SLOTS = 4
"""Fewer scales say nothing."""
_SAME = math.log(1.01)
"""How far scales of the same statistics may differ, when they are rounded to bfloat16."""
_LEAST_FACTOR = math.log(1.5)
"""How much smaller all scales have to be than amax asks for; a little clipping may be meant."""
SWAPPED = "the k and v scales are swapped"


def list_moves(layers: Sequence[int]) -> Iterator[tuple[str, dict[Slot, Slot]]]:
    """List the mix-ups, and the place whose scale each place then has."""
    k, v = KV_ROLES
    others = {k: v, v: k}
    yield SWAPPED, {(layer, role): (layer, others[role]) for layer, role in product(layers, others)}
    pairs = [((one, role), (other, role)) for one, other in pairwise(layers) for role in KV_ROLES]
    yield "each layer has the scales of the next one", dict(pairs)
    yield "each layer has the scales of the previous one", {other: one for one, other in pairs}


def are_swapped(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> bool:
    """Tell whether k and v are swapped, where estimates of what each place holds show it.

    The estimates of K and those of V may be off by a factor each.
    """
    _, swapped = next(list_moves([*dict.fromkeys(layer for layer, _ in scales)]))
    return _fits(scales, amax, swapped, by_role=True, most_shared=math.inf)


def find_mixup(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> dict[Slot, str]:
    """Say which places scales are of, where they fit what these hold far better than their own.

    A factor that all of them share, such as headroom, is left out; where K and V are swapped, one
    of K and another of V too. Empty where each scale is of its place.
    """
    layers = [*dict.fromkeys(layer for layer, _ in scales)]
    (text, swapped), *shifted = list_moves(layers)
    # of fewer layers, two factors would explain other text too
    kinds = (False, True) if len(layers) >= _LEAST_SLOTS else (False,)
    if any(_fits(scales, amax, swapped, by_role=kind) for kind in kinds):
        return dict.fromkeys(swapped, text)
    orders = {role: _find_order(scales, amax, role) for role in KV_ROLES}
    order = {slot: other for found in orders.values() for slot, other in found.items()}
    if order:
        roles = " and ".join(role for role, found in orders.items() if found)
        (layer, _), (other, _) = next(iter(order.items()))
        text = f"the {roles} scales are in another order: layer {layer} has that of layer {other}"
        return dict.fromkeys(order, text)
    fitting = (dict.fromkeys(moved, text) for text, moved in shifted if _fits(scales, amax, moved))
    return next(fitting, {})


def _find_order(
    scales: Mapping[Slot, float], amax: Mapping[Slot, float], role: Role
) -> dict[Slot, Slot]:
    """Map the places of one role to those whose scales they have; empty where none is moved.

    All scales have to be those of the statistics, each of one layer; text that differs would give
    other numbers.
    """
    own = _compare(scales, amax, {slot: slot for slot in scales if slot[1] is role})
    by_scale, by_amax = (sorted(own, key=lambda slot: by[slot]) for by in (scales, amax))
    order = dict(zip(by_scale, by_amax, strict=True))
    shared = _find_shared(_compare(scales, amax, order))
    if shared is None or abs(shared) > _MOST_SHARED:
        return {}
    moved = {slot: abs(each - shared) for slot, each in own.items()}
    if max(moved.values()) < _LEAST_MISFIT:
        return {}
    return {slot: order[slot] for slot, misfit in moved.items() if misfit > _SAME}


def find_common_factor(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> dict[Slot, str]:
    """Say by which factor all scales are too small; empty where none is common to them."""
    logs = _compare(scales, amax, {slot: slot for slot in scales})
    shared = _find_shared(logs)
    if shared is None or not _LEAST_FACTOR <= -shared <= _MOST_SHARED:
        return {}
    factor = math.exp(-shared)
    text = f"all scales of K and V are {factor:,.3g} times smaller than amax / {E4M3FN.max:g}"
    return dict.fromkeys(logs, f"{text} of the statistics: the largest values clip")


def _compare(
    scales: Mapping[Slot, float], amax: Mapping[Slot, float], moved: Mapping[Slot, Slot]
) -> dict[Slot, float]:
    """Give the logarithm of what a scale covers, divided by what the place holds it is put to."""
    return {
        slot: math.log(scales[slot] * E4M3FN.max / amax[place])
        for slot, place in moved.items()
        if slot in scales and {slot, place} <= amax.keys()
    }


def _find_shared(logs: Mapping[Slot, float]) -> float | None:
    """Find the logarithm of the factor that all share; None if they differ, or are too few."""
    if len(logs) < _LEAST_SLOTS:
        return None
    middle = median(logs.values())
    return middle if all(abs(each - middle) <= _SAME for each in logs.values()) else None


def _fits(
    scales: Mapping[Slot, float],
    amax: Mapping[Slot, float],
    moved: Mapping[Slot, Slot],
    *,
    by_role: bool = False,
    most_shared: float = _MOST_SHARED,
) -> bool:
    """Tell whether scales fit the places that they are `moved` to far better than their own.

    All scales may share a factor, or where `by_role` those of K one and those of V another one;
    `most_shared` is the logarithm of the largest.
    """
    there = _compare(scales, amax, moved)
    if len(there) < _LEAST_SLOTS:
        return False

    def measure(logs: Mapping[Slot, float]) -> tuple[float, float]:
        """Give the mean distance from the median of the group, and the largest median."""
        groups: dict[object, list[float]] = defaultdict(list)
        for (_, role), log in logs.items():
            groups[by_role and role].append(log)
        middles = {key: median(group) for key, group in groups.items()}
        distances = (abs(log - middles[key]) for key, group in groups.items() for log in group)
        return mean(distances), max(map(abs, middles.values()))

    own, _ = measure(_compare(scales, amax, {slot: slot for slot in there}))
    other, shared = measure(there)
    is_better = own > max(_LEAST_MISFIT, _LEAST_GAIN * other)
    return shared <= most_shared and other < _MOST_MISFIT and is_better
