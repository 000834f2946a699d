"""Choose the rules of K and V by what the model loses.

The divergences of tensors that are quantized alone nearly add up, and no other tensor hides them.
So K and V of the layers that lose most run alone with each rule, then all others together.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import FP8_CACHE, Plan, Unit, join_plans
from fp8calib.plugins.plan.measure import Measure
from fp8calib.verification.score import count_in_rounds
from fp8calib.verification.summary import compare_paired

_LEAST_ERRORS = 4.0
"""A rule must beat amax by this many standard errors (some hundred comparisons are made)."""
_AMAX = str(AMAX)


def choose_rules(
    measure: Measure, bundles: Sequence[Sequence[Unit]], rules: Sequence[str], *, most: int
) -> dict[str, str]:
    """Give the rule of K and V where another one than amax is better beyond doubt, by site.

    The K of a bundle share a rule, and its V do; `most` is that of passes.
    """
    names = list(dict.fromkeys((_AMAX, *rules)))
    plans = [join_plans(unit.plan(FP8_CACHE) for unit in units) for units in bundles]
    everything = join_plans(plans)
    most -= measure.count(plans) + count_in_rounds(len(names))
    if len(names) < 2 or not plans or most < 0:
        return {}
    klds = [float(scores.klds.double().mean()) for scores in measure.run(plans)]
    cells: list[list[Plan]] = []
    for index in sorted(range(len(plans)), key=lambda i: -klds[i]):
        own: list[list[Plan]] = [
            [dict.fromkeys(sites, name) for name in names] for sites in _list_cells(bundles[index])
        ]
        if measure.count([plan for cell in [*cells, *own] for plan in cell]) > most:
            break
        cells += own
    measure.run([plan for cell in cells for plan in cell])
    chosen = {site: rule for cell in cells for site, rule in _choose(measure, cell).items()}
    mixed = [{site: chosen.get(site, rule) for site in everything} for rule in names]
    best = _choose(measure, mixed) or {**everything, **chosen}
    return {site: rule for site, rule in best.items() if rule != _AMAX}


def _list_cells(units: Sequence[Unit]) -> list[list[str]]:
    """List the sites that share a rule: K, and V; those of latents share a scale too."""
    if any(unit.shares_scale for unit in units):
        return [[str(site) for unit in units for site in unit.sites]]
    return [[str(unit.sites[place]) for unit in units] for place in (0, 1)]


def _choose(measure: Measure, plans: Sequence[Plan]) -> Plan:
    """Give the best of plans if it is better than the first one beyond doubt; else nothing."""
    scores = measure.run(plans)
    klds: dict[str, torch.Tensor] = {str(i): each.klds for i, each in enumerate(scores)}
    best = min(klds, key=lambda name: float(klds[name].double().mean()))
    if best == "0":
        return {}
    pair = compare_paired(best, "0", klds, measure.lengths)
    is_far = pair.se is not None and abs(pair.difference) > _LEAST_ERRORS * pair.se
    is_sure = pair.answer == "better" and is_far
    return plans[int(best)] if is_sure else {}
