"""Find scales of weights and inputs that are wrong beside the statistics of a calibration."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fp8calib.checkpoint.header import TensorEntry
from fp8calib.engines.odd_scales import NUMBER, list_scales
from fp8calib.engines.scale_mistakes import Reach, find_odd, measure_reach
from fp8calib.errors import shorten
from fp8calib.formats.fp8.weights import WEIGHT_FORMATS
from fp8calib.model.geometry import Role, Site
from fp8calib.model.module_paths import name_fused_group
from fp8calib.numerics.formats import Fp8Format

if TYPE_CHECKING:
    from fp8calib.calibration.calibration_stats import RunStats


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
    for role, scale, weight in list_scales(tensors, largest):
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
            kinds[NUMBER.sub("#", weight)][weight] = text
    texts = [text for found in kinds.values() for text in found.values()]
    if sum(map(bool, texts)) > len(texts) * _MOST_ODD:
        return ""
    for found in kinds.values():
        odd = [weight for weight, text in found.items() if text]
        if odd and len(odd) <= len(found) / 2 and found[odd[0]] != _UNTOLD:
            return f"the scales of {shorten(odd[0])}: {found[odd[0]]}"
    return ""


_ROUNDED, _CLOSE, _APART = 0.01, 0.06, 1.8
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
    if np.allclose(np.sort(found), np.sort(meant), rtol=_ROUNDED):
        return f"{is_odd.sum():,} of its {found.size:,} {what} have those of other {what}"
    factors = np.maximum(found / meant, meant / found)[is_odd]
    if factors.min() < _APART:
        return _UNTOLD
    return f"those of {len(factors):,} of {found.size:,} {what} are {factors.max():.3g} times off"
