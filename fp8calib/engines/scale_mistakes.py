"""Find scales that are wrong beside what their tensors reach: alone, or all together.

What they reach is known from the statistics of a calibration, or estimated by the weights that make
K and V.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import mean, median
from typing import TYPE_CHECKING

from fp8calib.engines.odd_scales import (
    UNCALIBRATED,
    WITHIN,
    Key,
    list_used,
    name_mistakes,
    suspect_odd_scales,
)
from fp8calib.engines.replay.verdicts import EngineReport, Slot
from fp8calib.engines.status import Status
from fp8calib.model.geometry import KV_ROLES, Role, Site
from fp8calib.numerics.formats import E4M3FN, MOST_CLIPPED, Fp8Format

if TYPE_CHECKING:
    import torch

    from fp8calib.calibration.calibration_stats import RunStats

# --- a scale beside what its tensor reaches -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The magnitudes that the largest value of a tensor may have."""

    amax: float
    """The likely one."""
    least: float
    most: float
    source: str
    """What says so, as the end of a sentence."""
    within: float = WITHIN
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


_MOST_HEADROOM = 16.0
"""How far above the statistics a scale may be: other text and headroom give less."""
_MOST_CLIPPING = 64.0
"""How far below it may be, because rules like `percentile` clip outliers; see `MOST_CLIPPED`."""
_MOST_UNSEEN_CLIPPING = 4.0
"""The same where no histogram tells how many values that clips."""


def measure_reach(stats: RunStats, site: Site) -> Reach | None:
    """Give what calibration saw at a site; None if it saw nothing, or only zeros."""
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


def find_odd(
    scales: Mapping[Key, float], reaches: Mapping[Key, Reach], fmt: Fp8Format = E4M3FN
) -> dict[Key, str]:
    """Say what is odd about the scales of one kind, and what they look like.

    A scale is judged only if `reaches` has its tensor.
    """
    texts = {key: reach.judge(scales[key], fmt) for key, reach in reaches.items()}
    odd = {key: (scales[key], reaches[key].amax) for key, text in texts.items() if text}
    within = max((reaches[key].within for key in odd), default=WITHIN)
    mistakes = name_mistakes(odd, within=within, fmt=fmt)
    found = {}
    for key, (scale, amax) in odd.items():
        ratio = scale * fmt.max / amax
        size = "large" if ratio > 1 else "small"
        factor = f"about {max(ratio, 1 / ratio):,.3g} times too {size}"
        found[key] = f"{texts[key]}: {mistakes[key] or factor}"
    return found


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


# --- K and V --------------------------------------------------------------------------------------

_FIX = (
    "write the scales of these statistics: "
    "`fp8calib export STATS --format kv-overlay --model MODEL --replace-scales --out DIR`, or "
    "calibrate again"
)


def mark_odd_scales(report: EngineReport, factor: float, stats: RunStats) -> EngineReport:
    """Call scales of K and V bad that are far from statistics, or of another place.

    `factor` is by what the engine multiplies them before it uses them. Not every layer was seen by
    calibration.
    """
    reaches = {}
    for layer, attention in stats.geometry.attentions():
        owner = stats.geometry.producer_of(attention)
        for role in KV_ROLES:
            if (reach := measure_reach(stats, owner.site(role))) is not None:
                reaches[layer.index, role] = reach
    used = list_used(report, factor)
    found = _list_odd(used, _match(used, reaches))
    amax = {slot: reach.amax for slot, reach in reaches.items()}
    mixed = find_mixup(used, amax)
    found |= {
        slot: f"{text}: they fit the statistics there, not here" for slot, text in mixed.items()
    }
    found |= find_common_factor(used, amax)
    return report.mark(found, _FIX, Status.BAD)


def suspect_by_estimates(
    report: EngineReport, factor: float, estimates: Mapping[Slot, Reach]
) -> EngineReport:
    """Suspect scales of K and V beside what the weights tell of K and V, and beside each other."""
    used = list_used(report, factor)
    reaches = _match(used, estimates)
    likely = {slot: reach.amax / E4M3FN.max for slot, reach in reaches.items()}
    report = suspect_odd_scales(report, factor, likely=likely, odd=_list_odd(used, reaches))
    _, swapped = next(list_moves([*dict.fromkeys(layer for layer, _ in used)]))
    # the estimates of K and those of V may be off by a factor each
    if likely and _fits(used, likely, swapped, by_role=True, most_shared=math.inf):
        text = f"{SWAPPED}: they fit the weights of the other of the two"
        return report.add(suspicious=[text])
    return report


def _match(used: Mapping[Slot, float], reaches: Mapping[Slot, Reach]) -> dict[Slot, Reach]:
    """Give what each scale has to suit: the larger of K and V where one was made for both."""
    found = {}
    for (layer, role), scale in used.items():
        other = (layer, Role.V if role is Role.K else Role.K)
        is_shared = scale == used.get(other) and scale != UNCALIBRATED
        slots = [(layer, role), other] if is_shared else [(layer, role)]
        if reaches.keys() >= set(slots):
            found[layer, role] = max((reaches[slot] for slot in slots), key=lambda each: each.amax)
    return found


def _list_odd(used: Mapping[Slot, float], reaches: Mapping[Slot, Reach]) -> dict[Slot, str]:
    """Say what is odd about scales that are far from what their tensors reach."""
    groups = (
        {slot: each for slot, each in reaches.items() if slot[1] is role} for role in KV_ROLES
    )
    return {slot: text for group in groups for slot, text in find_odd(used, group).items()}
