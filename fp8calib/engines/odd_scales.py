"""Suspect scales of K, V, weights and inputs that are far from those of the other layers.

Or from what K, V and weights reach in the models in use; `scale_mistakes.py` compares scales with
what their own tensors reach.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from statistics import median
from types import MappingProxyType
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.replay.verdicts import EngineReport, Slot
from fp8calib.engines.status import Status
from fp8calib.errors import format_ranges, shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_weight_scales
from fp8calib.model.geometry import KV_ROLES, Role
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
WITHIN = 1.5
"""The factor by which scales of other text differ at most from those of the statistics."""


def name_mistakes(
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

_MOST_FACTOR_KV = 200.0
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
    most_factor: float = _MOST_FACTOR_KV,
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
    mistakes = name_mistakes(
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


# --- K and V --------------------------------------------------------------------------------------

_LEAST_USUAL, _MOST_USUAL_KV = 2.0**-20, 2.0
"""The median of the scales of K or of V that is not suspicious. K and V of the models in use reach
some 1 to 500, so their scales lie around 0.002 to 1."""
_MOST_FROM_ESTIMATE = 20.0
"""How far from what weights and the other layers suggest a scale may be. In SmolLM2-135M right
scales differ from it by at most 2.2 times."""
_ALL_UNCALIBRATED = (
    "every scale of K and V is 1.0, as in files that nobody calibrated; use --stats STATS to tell"
)


def suspect_odd_scales(
    report: EngineReport,
    factor: float = 1.0,
    *,
    likely: Mapping[Slot, float] = MappingProxyType({}),
    odd: Mapping[Slot, str] = MappingProxyType({}),
) -> EngineReport:
    """Suspect scales of K and V that no statistics are given for.

    The weights decide where they tell what K and V reach, with the scales of the other layers; else
    these, and what K and V reach in the models in use.

    Args:
        report: of an engine.
        factor: by what the engine multiplies scales before it uses them.
        likely: the scales that the weights suggest, where they do.
        odd: what is odd about scales that are far from these.
    """
    used = list_used(report, factor)
    found = dict(odd)
    suspicious: list[str] = []
    for role in KV_ROLES:
        scales = {layer: value for (layer, each), value in used.items() if each is role}
        expected = {layer: likely[layer, role] for layer in scales if (layer, role) in likely}
        known = {layer: scales[layer] for layer in expected}
        outliers = find_outliers(scales) if len(known) < len(scales) else {}
        outliers = {layer: text for layer, text in outliers.items() if layer not in known}
        outliers |= find_outliers(known, expected, most_factor=_MOST_FROM_ESTIMATE)
        for layer, text in outliers.items():
            found.setdefault((layer, role), text)
        middle = median(scales.values()) if scales else 1.0
        if not expected and not _LEAST_USUAL <= middle <= _MOST_USUAL_KV:
            text = f"the {role} scales ({min(scales.values()):.4g} to {max(scales.values()):.4g})"
            text += f" stand for values of up to {max(scales.values()) * E4M3FN.max:,.4g}"
            if middle > _MOST_USUAL_KV:
                text += ": they look like reciprocals, or like amax; engines need amax / 448"
            suspicious.append(text)
    noted = {slot: text for slot, text in found.items() if used[slot] == UNCALIBRATED}
    suspected = {slot: text for slot, text in found.items() if slot not in noted}
    problems = [*_summarize(noted)]
    if used and set(used.values()) == {UNCALIBRATED}:
        problems.append(_ALL_UNCALIBRATED)
    return report.add(suspicious=[*_summarize(suspected), *suspicious], problems=problems)


def list_used(report: EngineReport, factor: float) -> dict[Slot, float]:
    """List the scales of K and V that the engine uses."""
    return {
        slot: verdict.value * (1.0 if verdict.value == 1.0 else factor)
        for slot, verdict in report.slots.items()
        if verdict.status is Status.USED and verdict.value
    }


def _summarize(found: Mapping[Slot, str]) -> Iterator[str]:
    """Describe the first odd scale of K and of V, and list the layers of the others."""
    for role in KV_ROLES:
        layers = sorted(layer for layer, each in found if each is role)
        if layers:
            others = f" (and those of layers {format_ranges(layers[1:])})" if layers[1:] else ""
            yield f"the {role} scale of layer {layers[0]} {found[layers[0], role]}{others}"


# --- weights and inputs ---------------------------------------------------------------------------

_MOST_USUAL = {Role.WEIGHT: 448.0, Role.INPUT: 1000.0}
"""What the median of the weights, and of the inputs, of linears reach at most."""
_MOST_FACTOR = 100.0
"""How far from the other layers the scale of a kind of linear may be. In SmolLM2-135M the largest
weights of a kind are at most 3.5 times their median, its inputs after a norm at most 12 times."""
_MOST_INPUT_FACTOR = 500.0
"""The same for inputs that no norm limits: those of one `down_proj` are 152 times the median."""
_AFTER_NORM = re.compile(r"\.(q|k|v|qkv|gate|up|gate_up)_proj\.\w+$")
_PARTNERS = {"q": "k", "k": "q", "v": "o", "o": "v", "up": "down", "down": "up"}
"""The projections between which a factor can be moved, which leaves what a model computes."""
_PROJECTION = re.compile(rf"\.({'|'.join(_PARTNERS)})_proj\.")
_MOST_IMBALANCE = 4.0
NUMBER = re.compile(r"\d+")


def suspect_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]
) -> Iterator[tuple[str, Collection[str]]]:
    """Describe scales of weights and inputs that are as large as reciprocals, and outliers.

    `largest` is the largest number of each scale. The names of the scales follow the description.
    """
    reach: dict[Role, list[float]] = defaultdict(list)
    kinds: dict[tuple[Role, str], list[str]] = defaultdict(list)
    for role, scale, weight in list_scales(tensors, largest):
        reach[role].append(largest[scale] * WEIGHT_FORMATS[tensors[weight].dtype].max)
        kinds[role, NUMBER.sub("#", scale)].append(scale)
    for role, found in reach.items():
        if median(found) > _MOST_USUAL[role]:
            text = f"their {role} scales stand for {role}s of up to {max(found):,.4g}: they look"
            why = "like reciprocals; engines need amax / 448, not 448 / amax"
            yield f"{text} {why}", largest.keys()
            return
    ratios: dict[str, float] = {}
    for (role, _), names in kinds.items():
        if role is Role.WEIGHT and (middle := median(largest[name] for name in names)):
            ratios |= {name: largest[name] / middle for name in names}
    for (role, _), names in kinds.items():
        names.sort(key=lambda name: [int(number) for number in NUMBER.findall(name)])
        scales = {index: largest[name] for index, name in enumerate(names)}
        is_limited = role is Role.WEIGHT or _AFTER_NORM.search(names[0]) is not None
        factor = _MOST_FACTOR if is_limited else _MOST_INPUT_FACTOR
        for index, text in find_outliers(scales, most_factor=factor).items():
            if not _is_balanced(names[index], ratios):
                yield f"{shorten(names[index])} {text}", (names[index],)


_MOST_SIZE_FACTOR, _FEWEST_ALIKE = 30.0, 4
"""How far from the median the values of a matrix may be (3.9 times in SmolLM2-135M), and of how
many matrices."""


def suspect_sizes(sizes: Mapping[str, float]) -> Iterator[str]:
    """Describe the matrices whose root mean square is far from that in the other layers."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name in sizes:
        kinds[NUMBER.sub("#", name)].append(name)
    ratios = {
        name: sizes[name] / median(sizes[each] for each in names)
        for names in kinds.values()
        for name in names
        if len(names) >= _FEWEST_ALIKE
    }
    for name, ratio in ratios.items():
        factor = max(ratio, 1 / ratio)
        if factor > _MOST_SIZE_FACTOR and not _is_balanced(name, ratios):
            than = f"{'larger' if ratio > 1 else 'smaller'} than in the other layers"
            yield f"the values of {shorten(name)} are {factor:,.0f} times {than}: a wrong scale"


def _is_balanced(name: str, ratios: Mapping[str, float]) -> bool:
    """Whether the other projection is as much smaller as this one is larger than in most layers."""
    partner = _PROJECTION.sub(lambda found: f".{_PARTNERS[found[1]]}_proj.", name)
    if partner == name or partner not in ratios or name not in ratios:
        return False
    return 1 / _MOST_IMBALANCE < ratios[name] * ratios[partner] < _MOST_IMBALANCE


def list_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]
) -> Iterator[tuple[Role, str, str]]:
    """List the scales of FP8 weights and of their inputs: role, name and the weight's name."""
    for weight, entry in tensors.items():
        if entry.dtype in WEIGHT_FORMATS:
            for role in (Role.WEIGHT, Role.INPUT):
                names = name_weight_scales(weight, of_inputs=role is Role.INPUT)
                yield from ((role, name, weight) for name in names if name in largest)
