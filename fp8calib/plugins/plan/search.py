"""Search for a plan: measure groups alone, add, then measure whole plans.

Sums of groups only choose which plans are measured. What a plan costs is always a run of the whole
plan, and the plan that the caller gets is the best of those that were run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import inf
from typing import NamedTuple

import torch
from pydantic import Field

from fp8calib.errors import name_ranges
from fp8calib.model.geometry import Frozen
from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import (
    FP8_CACHE,
    IN_16_BITS,
    Choices,
    Plan,
    Unit,
    choice_of,
    count_bytes,
    join_plans,
    list_uniform,
)
from fp8calib.plugins.plan.inputs import Budget
from fp8calib.plugins.plan.measure import Measure
from fp8calib.verification.report import CandidateResult
from fp8calib.verification.score import AT_ONCE, count_in_rounds
from fp8calib.verification.summary import compare_paired

_WHOLE_SHARE = 8
"""Whole plans have this part of the passes: 1/8, and what groups and rules leave."""
_LEAST_ERRORS = 4.0
"""A rule must beat amax by this many standard errors (some hundred comparisons are made)."""
_AMAX = str(AMAX)
_ALIKE = 0.95
"""A scheme must be smaller than this share of another one that loses less."""

MOST_STATES = 2**12
"""With at most this many undominated plans, all are kept and the result is exact."""

Picks = tuple[int, ...]
"""The number of the choice of each group; 0 leaves it in 16 bits."""


class GroupChoice(Frozen):
    """One way to store a group, and what that costs alone, on the text of the search."""

    name: str
    size_bytes: int
    plan: Plan = Field(exclude=True, repr=False)
    """The plan that quantizes this group alone."""
    kld_mean: float = 0.0
    kld_se: float | None = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Units that are decided together."""

    name: str
    units: tuple[Unit, ...]
    choices: tuple[GroupChoice, ...]
    """The first one leaves all in 16 bits."""

    def pick(self, plan: Plan) -> int:
        """Give the number of the choice that a plan has."""
        names = {choice_of(unit, plan) for unit in self.units} - {IN_16_BITS}
        return next((i for i, each in enumerate(self.choices) if each.name in names), 0)


class Sum(NamedTuple):
    """A plan by the sum of its groups."""

    size_bytes: int
    kld: float
    picks: Picks


class Tried(NamedTuple):
    """A whole plan that was run."""

    size_bytes: int
    plan: Plan
    summary: CandidateResult
    kld: float


class Search:
    """Searches on one text, with at most so many passes beside those of one scheme for all."""

    def __init__(self, choices: Choices, measure: Measure, *, passes: int, can_skip: bool) -> None:
        """Search; with `can_skip` the cache of some layers can stay in 16 bits."""
        self._units, self._fixed = choices.units, choices.fixed_bytes
        self.measure, self._can_skip, self._passes = measure, can_skip, passes
        self._free = 0
        """Passes that do not count."""
        self._tried: list[Tried] = []
        self.groups: list[Group] = []
        """With what each choice costs alone."""
        self.dropped: dict[str, str] = {}
        """Why schemes that can be loaded were not searched."""
        self.points: Sequence[Plan] = ()
        """Others on the frontier."""

    def run(self, budget: Budget, rules: Sequence[str], *, points: int) -> Tried:
        """Find the plan for a budget, and so many others on the frontier."""
        uniform = list_uniform(self._units)
        _, *tried = self._try([{}, *uniform.values()])
        self._free = self.measure.passes
        kept = self._choose_schemes(dict(zip(uniform, tried, strict=True)))
        width = self._choose_groups(kept)
        self.measure.run(self._list_plans())
        bundles = bundle([unit for unit in self._units if unit.sites], width)
        most = self._left - self._passes // _WHOLE_SHARE
        self._use_rules(_choose_rules(self.measure, bundles, rules, most=most))
        frontier = list_frontier(self.groups)
        if budget.kind == "bytes":
            self._spend(frontier, budget.limit - self._fixed)
        else:
            self._save(frontier, budget)
        step = max(1, len(frontier) // (points + 1))
        self.points = [self._join(each.picks) for each in frontier[step:-1:step]][:points]
        return self._choose(budget)

    @property
    def _left(self) -> int:
        """The passes that are left."""
        return self._passes - (self.measure.passes - self._free)

    # --- groups alone ---------------------------------------------------------------------------

    def _choose_schemes(self, uniform: Mapping[str, Tried]) -> list[str]:
        """Leave out schemes that lose more than another one for all, and save next to nothing.

        Each one that stays is measured in all groups.
        """
        kept: dict[str, Tried] = {}
        schemes = {name: tried for name, tried in uniform.items() if "cache" not in name}
        for name, tried in sorted(schemes.items(), key=lambda item: item[1].kld):
            alike = [o for o, each in kept.items() if tried.size_bytes > _ALIKE * each.size_bytes]
            if alike:
                self.dropped[name] = f"for all layers {alike[0]} loses less in about the same bytes"
            else:
                kept[name] = tried
        return list(kept)

    def _choose_groups(self, schemes: Sequence[str]) -> int:
        """Choose the smallest groups that half of the passes can measure alone; give their width.

        All linears together, and all caches, were run already.
        """
        linears = [unit for unit in self._units if unit.linears]
        caches = [unit for unit in self._units if unit.sites]
        last = max(layer for unit in self._units for layer in (0, *unit.layers))
        widths: list[int] = [0, *(2**power for power in range(last.bit_length() + 1))]
        for width in widths:
            apart = bundle(caches, width if self._can_skip else widths[-1])
            self.groups = [
                *(_make_group(units, schemes, of=len(linears)) for units in bundle(linears, width)),
                *(_make_group(units, (FP8_CACHE,), of=len(caches)) for units in apart),
            ]
            if self.measure.count(self._list_plans()) <= self._left // 2:
                break
        return width

    def _list_plans(self) -> list[Plan]:
        return [choice.plan for group in self.groups for choice in group.choices]

    def _use_rules(self, rules: Mapping[str, str]) -> None:
        """Give the caches their rules, and note what each choice costs alone.

        Where too few passes are left to measure caches with their rules, they cost what amax costs.
        """
        before = self.groups
        self.groups = [_use_rules(group, rules) for group in before]
        if self.measure.count(self._list_plans()) <= self._left // 2:
            before = self.groups
        for g, group in enumerate(self.groups):
            measured = self.measure.summarize([choice.plan for choice in before[g].choices])
            priced = (
                choice.model_copy(
                    update={"kld_mean": summary.kld_mean or 0.0, "kld_se": summary.kld_se}
                )
                for choice, summary in zip(group.choices, measured, strict=True)
            )
            self.groups[g] = replace(group, choices=tuple(priced))

    # --- whole plans ----------------------------------------------------------------------------

    def _try(self, plans: Sequence[Plan]) -> list[Tried]:
        found = [
            Tried(
                self._fixed + count_bytes(self._units, plan), plan, summary, summary.kld_mean or 0.0
            )
            for plan, summary in zip(plans, self.measure.summarize(plans), strict=True)
        ]
        self._tried += found
        return found

    def _join(self, picks: Picks) -> Plan:
        """Join the choices of all groups."""
        return join_plans(g.choices[c].plan for g, c in zip(self.groups, picks, strict=True))

    def _spend(self, frontier: Sequence[Sum], limit: float) -> None:
        """Try the best sums just below `limit` bytes.

        Groups add to each other, or make up for each other, which sums do not tell.
        """
        fitting = [each for each in frontier if each.size_bytes <= limit] or frontier[:1]
        room = max(0, min(2 * AT_ONCE, self._left - 2))
        self._try([self._join(each.picks) for each in fitting[::-1][:room]])

    def _save(self, frontier: Sequence[Sum], budget: Budget) -> None:
        """Try plans between the largest that lost too much and the smallest that did not."""
        low, high = -1, len(frontier) - 1  # nothing is quantized at the end
        while (room := min(AT_ONCE, self._left - 1)) > 0 and high - low > 1:
            spaced = (low + (high - low) * step / (room + 1) for step in range(1, room + 1))
            indices = sorted({round(place) for place in spaced} - {low, high})
            tried = self._try([self._join(frontier[index].picks) for index in indices])
            for index, each in zip(indices, tried, strict=True):
                if budget.read_most(each.summary) <= budget.limit:
                    high = min(high, index)
                elif index < high:
                    low = index

    def _choose(self, budget: Budget) -> Tried:
        """Choose the best of the plans that were run and keep to the budget."""
        if budget.kind == "bytes":
            least = min(each.size_bytes for each in self._tried)
            fitting = [each for each in self._tried if each.size_bytes <= max(budget.limit, least)]
            return min(fitting, key=lambda each: each.kld)
        fitting = [e for e in self._tried if budget.read_most(e.summary) <= budget.limit]
        return min(fitting, key=lambda each: (each.size_bytes, each.kld))


def list_frontier(groups: Sequence[Group]) -> list[Sum]:
    """List the best sums by rising size and falling cost: no other of at most a size costs less.

    The undominated plans of the first groups are extended by each choice of the next one (Nemhauser
    and Ullmann, Management Science 15, 1969); of many, the best in equal steps of the size stay.
    """
    kept = [Sum(0, 0.0, ())]
    for group in groups:
        grown = sorted(
            Sum(size + choice.size_bytes, kld + choice.kld_mean, (*picks, c))
            for size, kld, picks in kept
            for c, choice in enumerate(group.choices)
        )
        kept, least = [], inf
        for each in grown:
            if each.kld < least:
                kept.append(each)
                least = each.kld
        if len(kept) > MOST_STATES:
            low, high = kept[0].size_bytes, kept[-1].size_bytes + 1
            step = Fraction(high - low, MOST_STATES)
            kept = list({(each.size_bytes - low) // step: each for each in kept}.values())
    return kept


def bundle(units: Sequence[Unit], width: int) -> list[tuple[Unit, ...]]:
    """Put units of so many neighbouring layers together; 0 leaves each unit alone."""
    found: dict[int, list[Unit]] = defaultdict(list)
    for number, unit in enumerate(units):
        found[min(unit.layers, default=0) // width if width else number].append(unit)
    return [tuple(each) for each in found.values()]


def _use_rules(group: Group, rules: Mapping[str, str]) -> Group:
    if not group.units[0].sites:
        return group
    plain, stored = group.choices
    plan = {site: rules.get(site, rule) for site, rule in stored.plan.items()}
    return replace(group, choices=(plain, stored.model_copy(update={"plan": plan})))


def _make_group(units: tuple[Unit, ...], schemes: Iterable[str], *, of: int) -> Group:
    """Make the group of units, `of` so many; a scheme that one cannot have leaves it in 16 bits."""
    layers = sorted({layer for unit in units for layer in unit.layers})
    kind = "KV caches" if units[0].sites else "linears"
    named = {1: units[0].name, of: f"all {kind}"}
    name = named.get(len(units), f"{kind} of {name_ranges(layers)}" if layers else f"other {kind}")
    plans: dict[str, Plan] = {IN_16_BITS: {}}
    plans |= {each: join_plans(unit.plan(each) for unit in units) for each in schemes}
    choices = (
        GroupChoice(name=each, size_bytes=count_bytes(units, plan), plan=plan)
        for each, plan in plans.items()
        if plan or each == IN_16_BITS
    )
    return Group(name=name, units=units, choices=tuple(choices))


# --- the rules of K and V -------------------------------------------------------------------------
#
# The divergences of tensors that are quantized alone nearly add up, and no other tensor hides them.
# So K and V of the layers that lose most run alone with each rule, then all others together.


def _choose_rules(
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
    chosen = {site: rule for cell in cells for site, rule in _choose_best(measure, cell).items()}
    mixed = [{site: chosen.get(site, rule) for site in everything} for rule in names]
    best = _choose_best(measure, mixed) or {**everything, **chosen}
    return {site: rule for site, rule in best.items() if rule != _AMAX}


def _list_cells(units: Sequence[Unit]) -> list[list[str]]:
    """List the sites that share a rule: K, and V; those of latents share a scale too."""
    if any(unit.shares_scale for unit in units):
        return [[str(site) for unit in units for site in unit.sites]]
    return [[str(unit.sites[place]) for unit in units] for place in (0, 1)]


def _choose_best(measure: Measure, plans: Sequence[Plan]) -> Plan:
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
