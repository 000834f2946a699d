"""Name scales of FP8 weights and of their inputs that do not fit what they belong to."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from statistics import median

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.outliers import find_outliers
from fp8calib.engines.reach import Reach, find_odd, measure_reach
from fp8calib.engines.status import Status
from fp8calib.engines.weights.finding import Finding
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS, name_companions
from fp8calib.model.shapes import Role, Site
from fp8calib.numerics.formats import Fp8Format

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
_FIX = "quantize the model again"


def map_measured(stats: CalibrationStats) -> dict[str, str]:
    """Map the weights of linears that were calibrated to their modules; of experts none."""
    return {
        linear.checkpoint_name: linear.module
        for _, linear in stats.geometry.linears()
        if linear.checkpoint_name is not None and not linear.num_experts
    }


def judge_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float], stats: CalibrationStats
) -> Finding | None:
    """Find a scale of an FP8 weight, or of its input, that is far from the statistics.

    Args:
        tensors: of the checkpoint, by name.
        largest: the largest number of each scale, by name.
        stats: of the unquantized model.
    """
    sites = map_measured(stats)
    reaches: dict[tuple[Role, Fp8Format], dict[str, Reach]] = defaultdict(dict)
    for role, scale, weight in _list_scales(tensors, largest):
        site = Site(sites.get(weight, ""), role)
        if (reach := measure_reach(stats, site)) is not None:
            reaches[role, WEIGHT_FORMATS[tensors[weight].dtype]][scale] = reach
    for (_, fmt), group in reaches.items():
        for name, text in find_odd(largest, group, fmt).items():
            why = f"{shorten(name)} ({largest[name]:.4g}) {text}"
            return Finding(status=Status.MISREAD, why=why, fix=_FIX)
    return None


def suspect_weight_scales(
    tensors: Mapping[str, TensorEntry], largest: Mapping[str, float]
) -> Iterator[tuple[str, Collection[str]]]:
    """Describe scales of weights and inputs that are as large as reciprocals, and outliers.

    Args:
        tensors: of the checkpoint, by name.
        largest: the largest number of each scale, by name.

    Yields:
        The description, and the names of the scales.
    """
    reach: dict[Role, list[float]] = defaultdict(list)
    kinds: dict[tuple[Role, str], list[str]] = defaultdict(list)
    for role, scale, weight in _list_scales(tensors, largest):
        reach[role].append(largest[scale] * WEIGHT_FORMATS[tensors[weight].dtype].max)
        kinds[role, _NUMBER.sub("#", scale)].append(scale)
    for role, found in reach.items():
        if median(found) > _MOST_USUAL[role]:
            text = f"their {role} scales stand for {role}s of up to {max(found):,.4g}: they look"
            yield (
                f"{text} like reciprocals; engines need amax / 448, not 448 / amax",
                largest.keys(),
            )
            return
    ratios: dict[str, float] = {}
    for (role, _), names in kinds.items():
        if role is Role.WEIGHT and (middle := median(largest[name] for name in names)):
            ratios |= {name: largest[name] / middle for name in names}
    for (role, _), names in kinds.items():
        names.sort(key=_list_numbers)
        scales = {index: largest[name] for index, name in enumerate(names)}
        is_limited = role is Role.WEIGHT or _AFTER_NORM.search(names[0]) is not None
        factor = _MOST_FACTOR if is_limited else _MOST_INPUT_FACTOR
        for index, text in find_outliers(scales, most_factor=factor).items():
            if not _is_balanced(names[index], ratios):
                yield f"{shorten(names[index])} {text}", (names[index],)


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


def _list_numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]
