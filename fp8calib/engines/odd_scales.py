"""Name scales of K, V, weights and inputs that are far from what they hold, such as reciprocals.

What they hold is known from the statistics of a calibration, else from the weights that make K and
V, else from the other layers, and from the models in use.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.replay.verdicts import EngineReport
from fp8calib.engines.scale_mistakes import (
    SWAPPED,
    UNCALIBRATED,
    Reach,
    Slot,
    are_swapped,
    find_common_factor,
    find_mixup,
    find_odd,
    find_outliers,
)
from fp8calib.engines.status import Status
from fp8calib.errors import format_ranges, shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.model.geometry import KV_ROLES, Role, Site
from fp8calib.model.module_paths import name_fused_group
from fp8calib.numerics.formats import E4M3FN, Fp8Format

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats

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
_FIX = (
    "write the scales of these statistics: "
    "`fp8calib export STATS --format kv-overlay --model MODEL --replace-scales --out DIR`, or "
    "calibrate again"
)


def measure_reaches(stats: RunStats) -> dict[Slot, Reach]:
    """Give what calibration saw of K and V, by layer and role; not every layer was seen."""
    found = {}
    for layer, attention in stats.geometry.attentions():
        owner = stats.geometry.producer_of(attention)
        for role in KV_ROLES:
            if (reach := measure_reach(stats, owner.site(role))) is not None:
                found[layer.index, role] = reach
    return found


def mark_odd_scales(
    report: EngineReport, factor: float = 1.0, *, reaches: Mapping[Slot, Reach]
) -> EngineReport:
    """Call scales of K and V bad that are far from statistics, or of another place.

    `factor` is by what the engine multiplies them before it uses them.
    """
    used = _list_used(report, factor)
    found = _list_odd(used, _match(used, reaches))
    amax = {slot: reach.amax for slot, reach in reaches.items()}
    mixed = find_mixup(used, amax)
    found |= {
        slot: f"{text}: they fit the statistics there, not here" for slot, text in mixed.items()
    }
    found |= find_common_factor(used, amax)
    return report.mark(found, _FIX, Status.BAD)


def suspect_odd_scales(
    report: EngineReport, factor: float = 1.0, *, estimates: Mapping[Slot, Reach]
) -> EngineReport:
    """Suspect scales of K and V that no statistics are given for.

    The weights decide where they tell what K and V reach, with the scales of the other layers; else
    these, and what K and V reach in the models in use. `estimates` are empty where weights are not
    read; `factor` is as for `mark_odd_scales`.
    """
    used = _list_used(report, factor)
    reaches = _match(used, estimates) if estimates else {}
    likely = {slot: reach.amax / E4M3FN.max for slot, reach in reaches.items()}
    found: dict[Slot, str] = {}
    for role in KV_ROLES:
        scales = {layer: value for (layer, each), value in used.items() if each is role}
        expected = {layer: likely[layer, role] for layer in scales if (layer, role) in likely}
        known = {layer: scales[layer] for layer in expected}
        unlike = find_outliers(known, expected, most_factor=_MOST_FROM_ESTIMATE)
        others = {
            layer: text for layer, text in find_outliers(scales).items() if layer not in known
        }
        found |= {(layer, role): text for layer, text in {**others, **unlike}.items()}
    if reaches:
        found |= _list_odd(used, reaches)
    noted = {slot: text for slot, text in found.items() if used[slot] == UNCALIBRATED}
    suspected = {slot: text for slot, text in found.items() if slot not in noted}
    suspicious, problems = [*_summarize(suspected)], [*_summarize(noted)]
    if used and set(used.values()) == {UNCALIBRATED}:
        problems.append(_ALL_UNCALIBRATED)
    if reaches and are_swapped(used, likely):
        suspicious.append(f"{SWAPPED}: they fit the weights of the other of the two")
    estimated = {role for _, role in reaches}
    unusual = (_find_unusual(used, role) for role in KV_ROLES if role not in estimated)
    return report.add(suspicious=[*suspicious, *filter(None, unusual)], problems=problems)


def _list_used(report: EngineReport, factor: float) -> dict[Slot, float]:
    """List the scales of K and V that the engine uses."""
    return {
        slot: verdict.value * (1.0 if verdict.value == 1.0 else factor)
        for slot, verdict in report.slots.items()
        if verdict.status is Status.USED and verdict.value
    }


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


def _summarize(found: Mapping[Slot, str]) -> Iterator[str]:
    """Describe the first odd scale of K and of V, and list the layers of the others."""
    for role in KV_ROLES:
        layers = sorted(layer for layer, each in found if each is role)
        if layers:
            others = f" (and those of layers {format_ranges(layers[1:])})" if layers[1:] else ""
            yield f"the {role} scale of layer {layers[0]} {found[layers[0], role]}{others}"


def _find_unusual(used: Mapping[Slot, float], role: Role) -> str:
    """Name scales as large as reciprocals are, or far too small for K or V of any model."""
    values = [value for (_, each), value in used.items() if each is role]
    if not values or _LEAST_USUAL <= median(values) <= _MOST_USUAL_KV:
        return ""
    found = f"the {role} scales ({min(values):.4g} to {max(values):.4g}) stand for values of up to "
    found += f"{max(values) * E4M3FN.max:,.4g}"
    if median(values) > _MOST_USUAL_KV:
        found += ": they look like reciprocals, or like amax; engines need amax / 448"
    return found


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
_NUMBER = re.compile(r"\d+")


def map_measured(stats: RunStats) -> dict[str, str]:
    """Map the weights of linears that were calibrated to their modules; of experts none."""
    return {
        linear.checkpoint_name: linear.module
        for _, linear in stats.geometry.linears()
        if linear.checkpoint_name is not None and not linear.num_experts
    }


def judge_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float], stats: RunStats
) -> str:
    """Describe a scale of an FP8 weight, or of its input, that is far from the statistics.

    `largest` is the largest number of each scale.
    """
    sites = map_measured(stats)
    reaches: dict[tuple[Role, Fp8Format], dict[str, Reach]] = defaultdict(dict)
    for role, scale, weight in _list_scales(tensors, largest):
        if (reach := measure_reach(stats, Site(sites.get(weight, ""), role))) is not None:
            reaches[role, WEIGHT_FORMATS[tensors[weight].dtype]][scale] = reach
    for (_, fmt), group in reaches.items():
        for name, text in find_odd(largest, group, fmt).items():
            return f"{shorten(name)} ({largest[name]:.4g}) {text}"
    return ""


def judge_scale_places(
    scales: Mapping[str, tuple[NDArray[np.float32], tuple[int, int]]], stats: RunStats
) -> str:
    """Describe scales of a weight that are of other rows or blocks, or off by a factor.

    Only where most weights have the scales that their largest values give, also those of the same
    kind in other layers: not after a method that changes weights, or clips them. `scales` are, by
    the weight's name, the largest values that they stand for, and the size of the blocks.
    """
    modules = map_measured(stats)
    reached: dict[str, list[NDArray[np.float32]]] = {}
    groups: dict[str, float] = defaultdict(float)
    for weight in scales.keys() & modules.keys():
        held = stats.sites.get(Site(modules[weight], Role.WEIGHT))
        if held is not None and held.amax_in is not None and held.amax.numel():
            reached[weight] = [held.amax.float().numpy(), held.amax_in.float().numpy()]
            group = name_fused_group(weight.removesuffix(".weight"))
            groups[group] = max(groups[group], float(held.amax.max()))
    kinds: dict[str, dict[str, str]] = defaultdict(dict)
    for weight in sorted(reached):
        shared = groups[name_fused_group(weight.removesuffix(".weight"))]
        text = _compare_places(scales[weight][0], reached[weight], scales[weight][1], shared)
        if text is not None:
            kinds[_NUMBER.sub("#", weight)][weight] = text
    texts = [text for found in kinds.values() for text in found.values()]
    if sum(map(bool, texts)) > len(texts) * _MOST_ODD:
        return ""
    for found in kinds.values():
        odd = [weight for weight, text in found.items() if text]
        if odd and len(odd) <= len(found) / 2 and found[odd[0]] != _UNTOLD:
            return f"the scales of {shorten(odd[0])}: {found[odd[0]]}"
    return ""


_SAME, _CLOSE, _APART = 0.01, 0.06, 1.8
"""What differs less is a scale rounded to 16 bits; is that of amax; may be of another rule."""
_LEAST = 1e-3
"""Rows that reach less than this share of the largest may have the smallest scale of a tool."""
_MOST_ODD = 0.2
"""The share of weights that may have other scales where a scale is known to be of amax."""
_UNTOLD = "other scales"


def _compare_places(
    found: NDArray[np.float32],
    amax: Sequence[NDArray[np.float32]],
    block: tuple[int, int],
    shared: float,
) -> str | None:
    """Say how scales differ from those of amax; None where their shape cannot be compared.

    They stand for largest values of `found`; `amax` is what outputs and inputs reach, and `shared`
    what the linears reach that an engine joins, which may have one scale.
    """
    if found.size == 1:
        return _compare_number(found.item(), float(amax[0].max()), shared)
    grid = found.reshape(len(found), -1)
    for held, reach, width in zip((grid.max(1), grid.max(0)), amax, block, strict=True):
        span = 1 if held.size == reach.size else width
        if held.size == 1:
            continue
        if held.size != -(-reach.size // span):
            return None
        meant = np.maximum.reduceat(reach, np.arange(0, reach.size, span))
        is_odd = (np.abs(held - meant) > _CLOSE * meant) & (meant > meant.max() * _LEAST)
        if is_odd.any():
            return _describe_odd(held, meant, is_odd, "rows" if span == 1 else "blocks")
    return ""


def _compare_number(found: float, own: float, shared: float) -> str:
    if not own or any(abs(found / each - 1) <= _CLOSE for each in (own, shared)):
        return ""
    if own / _APART < found < shared * _APART:
        return _UNTOLD
    kind = "large" if found > own else "small"
    return f"it is {max(found / shared, own / found):.3g} times too {kind} for its largest value"


def _describe_odd(
    found: NDArray[np.float32], meant: NDArray[np.float32], is_odd: NDArray[np.bool_], what: str
) -> str:
    if np.allclose(np.sort(found), np.sort(meant), rtol=_SAME):
        return f"{is_odd.sum():,} of its {found.size:,} {what} have those of other {what}"
    factors = np.maximum(found / meant, meant / found)[is_odd]
    if factors.min() < _APART:
        return _UNTOLD
    return f"those of {len(factors):,} of {found.size:,} {what} are {factors.max():.3g} times off"


def suspect_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]
) -> Iterator[tuple[str, Collection[str]]]:
    """Describe scales of weights and inputs that are as large as reciprocals, and outliers.

    `largest` is the largest number of each scale. The names of the scales follow the description.
    """
    reach: dict[Role, list[float]] = defaultdict(list)
    kinds: dict[tuple[Role, str], list[str]] = defaultdict(list)
    for role, scale, weight in _list_scales(tensors, largest):
        reach[role].append(largest[scale] * WEIGHT_FORMATS[tensors[weight].dtype].max)
        kinds[role, _NUMBER.sub("#", scale)].append(scale)
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
        names.sort(key=lambda name: [int(number) for number in _NUMBER.findall(name)])
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
        kinds[_NUMBER.sub("#", name)].append(name)
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


def _list_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]
) -> Iterator[tuple[Role, str, str]]:
    """List the scales of FP8 weights and of their inputs: role, name and the weight's name."""
    for weight, entry in tensors.items():
        if entry.dtype in WEIGHT_FORMATS:
            companions = name_companions(weight)
            names = {Role.WEIGHT: companions.scales, Role.INPUT: companions.input_scales}
            for role, each in names.items():
                yield from ((role, name, weight) for name in each if name in largest)
