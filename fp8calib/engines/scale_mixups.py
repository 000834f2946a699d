"""Find scales of K and V that are wrong together: swapped, of other layers, or by one factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product
from statistics import mean, median

from fp8calib.model.shapes import KV_ROLES, Role
from fp8calib.numerics.formats import E4M3FN

Slot = tuple[int, Role]
"""A layer and K or V."""
_LEAST_MISFIT = math.log(1.1)
"""How far scales have to be from their own places on average; other text gives less."""
_LEAST_GAIN = 2.0
"""How many times better they have to fit the other places."""
_MOST_MISFIT = math.log(1.5)
"""How far they may be from the other places on average."""
_MOST_SHARED = math.log(64.0)
"""The factor that all of them may share, of headroom or clipping; reciprocals are farther off."""
_LEAST_SLOTS = 4
"""Of fewer scales nothing can be said."""
_SAME = math.log(1.01)
"""How far scales of the same statistics may differ, when they are rounded to bfloat16."""
_LEAST_FACTOR = math.log(1.5)
"""How much smaller all scales have to be than amax asks for; a little clipping may be meant."""


def find_swap(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> str:
    """Say that k and v are swapped, where an estimate of what they hold shows it.

    The estimates of K and those of V may be off by a factor each.

    Args:
        scales: by layer and role.
        amax: what each place holds, about.
    """
    _, swapped = next(list_moves([*dict.fromkeys(layer for layer, _ in scales)]))
    groups = [[slot for slot in swapped if slot[1] is role] for role in KV_ROLES]
    return _SWAPPED if _fits(scales, amax, swapped, groups) else ""


def find_mixup(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> tuple[str, list[Slot]]:
    """Say which places scales are of, where they fit those far better than their own.

    A factor that all of them share, such as headroom, is left out.

    Args:
        scales: by layer and role.
        amax: what each place holds.

    Returns:
        What happened, and the scales that it changes; nothing where each scale is of its place.
    """
    swapped, *shifted = list_moves([*dict.fromkeys(layer for layer, _ in scales)])
    if _fits(scales, amax, swapped[1], [list(swapped[1])], most_shared=_MOST_SHARED):
        return swapped[0], list(swapped[1])
    found = [_find_order(scales, amax, role) for role in KV_ROLES]
    if any(found):
        order = {slot: other for each in found for slot, other in each.items()}
        roles = " and ".join(role for role, each in zip(KV_ROLES, found, strict=True) if each)
        (layer, _), (other, _) = next(iter(order.items()))
        text = f"the {roles} scales are in another order: layer {layer} has that of layer {other}"
        return text, list(order)
    for text, moved in shifted:
        if _fits(scales, amax, moved, [list(moved)], most_shared=_MOST_SHARED):
            return text, list(moved)
    return "", []


def _find_order(
    scales: Mapping[Slot, float], amax: Mapping[Slot, float], role: Role
) -> dict[Slot, Slot]:
    """Map the places of one role to those whose scales they have; empty where none is moved.

    All scales have to be those of the statistics, each of one layer; text that differs would give
    other numbers.
    """
    slots = [slot for slot in scales if slot[1] is role and slot in amax]
    if len(slots) < _LEAST_SLOTS:
        return {}
    by_scale = sorted(slots, key=lambda slot: scales[slot])
    order = dict(zip(by_scale, sorted(slots, key=lambda slot: amax[slot]), strict=True))
    shared = _find_shared([_compare(scales[slot], amax[order[slot]]) for slot in slots])
    if shared is None or abs(shared) > _MOST_SHARED:
        return {}
    own = {slot: abs(_compare(scales[slot], amax[slot]) - shared) for slot in slots}
    if max(own.values()) < _LEAST_MISFIT:
        return {}
    return {slot: order[slot] for slot in slots if own[slot] > _SAME}


def find_common_factor(scales: Mapping[Slot, float], amax: Mapping[Slot, float]) -> dict[Slot, str]:
    """Say by which factor all scales are too small; empty where none is common to them."""
    slots = [slot for slot in scales if slot in amax]
    if len(slots) < _LEAST_SLOTS:
        return {}
    shared = _find_shared([_compare(scales[slot], amax[slot]) for slot in slots])
    if shared is None or not _LEAST_FACTOR <= -shared <= _MOST_SHARED:
        return {}
    factor = math.exp(-shared)
    text = f"all scales of K and V are {factor:,.3g} times smaller than amax / {E4M3FN.max:g}"
    return dict.fromkeys(slots, f"{text} of the statistics: the largest values clip")


def _compare(scale: float, amax: float) -> float:
    """Give the logarithm of what a scale covers, divided by what a place holds."""
    return math.log(scale * E4M3FN.max / amax)


def _find_shared(logs: Sequence[float]) -> float | None:
    """Find the logarithm of the factor that all share; None where they differ."""
    middle = median(logs)
    return middle if all(abs(each - middle) <= _SAME for each in logs) else None


_SWAPPED = "the k and v scales are swapped"
_NEXT = "each layer has the scales of the next one"
_PREVIOUS = "each layer has the scales of the previous one"


def list_moves(layers: Sequence[int]) -> Iterator[tuple[str, dict[Slot, Slot]]]:
    """List the mix-ups, and the place whose scale each place then has."""
    k, v = KV_ROLES
    yield (
        _SWAPPED,
        {
            (layer, role): (layer, v if role is k else k)
            for layer, role in product(layers, KV_ROLES)
        },
    )
    pairs = [((one, role), (other, role)) for one, other in pairwise(layers) for role in KV_ROLES]
    yield _NEXT, dict(pairs)
    yield _PREVIOUS, {other: one for one, other in pairs}


def _fits(
    scales: Mapping[Slot, float],
    amax: Mapping[Slot, float],
    moved: Mapping[Slot, Slot],
    groups: Sequence[Sequence[Slot]],
    *,
    most_shared: float = math.inf,
) -> bool:
    known = {
        slot: other
        for slot, other in moved.items()
        if slot in scales and {slot, other} <= amax.keys()
    }
    groups = [[slot for slot in group if slot in known] for group in groups]
    if len(known) < _LEAST_SLOTS:
        return False
    factors = [
        [[_compare(scales[slot], amax[place(slot)]) for slot in group] for group in groups if group]
        for place in (lambda slot: slot, known.__getitem__)
    ]
    # the mean distance of logarithms from the median of their group
    own, other = (
        mean([abs(each - median(group)) for group in groups for each in group])
        for groups in factors
    )
    is_better = other < _MOST_MISFIT and own > max(_LEAST_MISFIT, _LEAST_GAIN * other)
    return is_better and all(abs(median(group)) <= most_shared for group in factors[1])
