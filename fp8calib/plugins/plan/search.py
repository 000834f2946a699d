"""Search for a plan: measure groups alone, add, then measure whole plans.

Sums of groups only choose which plans are measured. What a plan costs is always a run of the whole
plan, and the plan that the caller gets is the best of those that were run.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import combinations, pairwise
from math import inf
from typing import NamedTuple, TypeVar

from fp8calib.errors import name_ranges
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
from fp8calib.plugins.plan.measure import Measure
from fp8calib.plugins.plan.opened import Budget
from fp8calib.plugins.plan.rules import choose_rules
from fp8calib.verification.score import AT_ONCE
from fp8calib.verification.summary import Summary

_WHOLE_SHARE = 8
"""Whole plans have this part of the passes: 1/8, and what groups and rules leave."""
_ALIKE = 0.05
"""Schemes whose sizes differ by a smaller share are not both searched."""

MOST_STATES = 2**12
"""So many undominated plans of the groups so far are kept, and the result is exact."""

K = TypeVar("K", bound=Hashable)
Picks = tuple[int, ...]
"""The number of the choice of each group; 0 leaves it in 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One way to store a group."""

    name: str
    size_bytes: int
    plan: Plan
    """Of this group alone."""
    kld_mean: float = 0.0
    """What it costs alone."""
    kld_se: float | None = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Units that are decided together."""

    name: str
    units: tuple[Unit, ...]
    choices: tuple[Choice, ...]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A whole plan that was run."""

    plan: Plan
    size_bytes: int
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan, and what it was chosen by."""

    best: Tried
    groups: Sequence[Group]
    points: Sequence[Plan]
    """Others on the frontier."""
    dropped: Mapping[str, str]
    """Why schemes that can be loaded were not searched."""


class Search:
    """Searches on one text, with at most so many passes beside those of one scheme for all."""

    def __init__(self, choices: Choices, measure: Measure, *, passes: int, can_skip: bool) -> None:
        """Search; with `can_skip` the cache of some layers can stay in 16 bits."""
        self._units, self._fixed = choices.units, choices.fixed_bytes
        self._measure, self._can_skip, self._passes = measure, can_skip, passes
        self._free = 0
        """Passes that do not count."""
        self._tried: list[Tried] = []
        self._groups: list[Group] = []

    def run(self, budget: Budget, most_bytes: float, rules: Sequence[str], *, points: int) -> Found:
        """Find the plan for a budget; `most_bytes` is infinite without one of bytes.

        `points` is the number of other plans to list on the frontier.
        """
        uniform = list_uniform(self._units)
        self._try([{}, *uniform.values()])
        self._free = self._measure.passes
        kept, dropped = self._choose_schemes(uniform)
        width = self._choose_groups(kept)
        self._measure.run(self._list_plans())
        bundles = bundle([unit for unit in self._units if unit.sites], width)
        most = self._left - self._passes // _WHOLE_SHARE
        self._use_rules(choose_rules(self._measure, bundles, rules, most=most))
        frontier = list_frontier(self._groups)
        if budget.kind == "bytes":
            self._spend(frontier, most_bytes - self._fixed)
        else:
            self._save(frontier, budget)
        best = self._choose(budget, most_bytes)
        step = max(1, len(frontier) // (points + 1))
        return Found(
            best=best,
            groups=self._groups,
            points=[self._join(each.picks) for each in frontier[step:-1:step]][:points],
            dropped=dropped,
        )

    @property
    def _left(self) -> int:
        """The passes that are left."""
        return self._passes - (self._measure.passes - self._free)

    # --- groups alone ---------------------------------------------------------------------------

    def _choose_schemes(self, uniform: Mapping[str, Plan]) -> tuple[list[str], dict[str, str]]:
        """Leave out schemes that a mix of others and 16 bits beats, in bytes and in loss.

        They are above the lower hull of the plans with one scheme for all. A scheme that loses more
        and saves next to nothing is left out too: each one that stays is measured in all groups.
        """
        names = [IN_16_BITS, *(name for name in uniform if "cache" not in name)]
        points = {
            name: (tried.size_bytes, tried.summary.kld_mean or 0.0)
            for name in names
            for tried in self._tried
            if tried.plan == uniform.get(name, {})
        }
        hull = [name for name in find_hull(points) if name != IN_16_BITS]
        kept = [
            name
            for name, other in pairwise([*hull, IN_16_BITS])
            if points[name][0] < (1 - _ALIKE) * points[other][0]
        ]
        why = f"for all layers it loses no less, for its bytes, than {', '.join(kept)} and 16 bits"
        return kept, {name: why for name in names[1:] if name not in kept}

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
            self._groups = [
                *(_make_group(units, schemes, of=len(linears)) for units in bundle(linears, width)),
                *(_make_group(units, (FP8_CACHE,), of=len(caches)) for units in apart),
            ]
            if self._measure.count(self._list_plans()) <= self._left // 2:
                break
        return width

    def _list_plans(self) -> list[Plan]:
        return [choice.plan for group in self._groups for choice in group.choices]

    def _use_rules(self, rules: Mapping[str, str]) -> None:
        """Give the caches their rules, and note what each choice costs alone.

        Where too few passes are left to measure caches with their rules, they cost what amax costs.
        """
        before = self._groups
        self._groups = [_use_rules(group, rules) for group in before]
        if self._measure.count(self._list_plans()) <= self._left // 2:
            before = self._groups
        for g, group in enumerate(self._groups):
            measured = self._measure.summarize([choice.plan for choice in before[g].choices])
            priced = (
                replace(choice, kld_mean=summary.kld_mean or 0.0, kld_se=summary.kld_se)
                for choice, summary in zip(group.choices, measured, strict=True)
            )
            self._groups[g] = replace(group, choices=tuple(priced))

    # --- whole plans ----------------------------------------------------------------------------

    def _try(self, plans: Sequence[Plan]) -> list[Tried]:
        found = [
            Tried(
                plan=plan,
                size_bytes=self._fixed + count_bytes(self._units, plan),
                summary=summary,
            )
            for plan, summary in zip(plans, self._measure.summarize(plans), strict=True)
        ]
        self._tried += found
        return found

    def _join(self, picks: Picks) -> Plan:
        """Join the choices of all groups."""
        return join_plans(g.choices[c].plan for g, c in zip(self._groups, picks, strict=True))

    def _spend(self, frontier: Sequence[Sum], limit: float) -> None:
        """Try the best sum of at most `limit` bytes and plans near it, while one is better.

        Groups add to each other, or make up for each other, which sums do not tell.
        """
        start = [each for each in frontier if each.size_bytes <= limit] or frontier[:1]
        best, limit = start[-1].picks, max(limit, start[-1].size_bytes)
        seen: set[Picks] = set()
        least = inf
        while (room := min(AT_ONCE, self._left - 1)) > 0:
            near = [best, *list_near(self._groups, best, limit)]
            new = [picks for picks in near if picks not in seen][:room]
            seen |= set(new)
            klds = [each.summary.kld_mean or 0.0 for each in self._try(list(map(self._join, new)))]
            if min(klds, default=inf) >= least:
                break
            least = min(klds)
            best = new[klds.index(least)]

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

    def _choose(self, budget: Budget, most_bytes: float) -> Tried:
        """Choose the best of the plans that were run and keep to the budget."""
        if budget.kind == "bytes":
            least = min(each.size_bytes for each in self._tried)
            fitting = [each for each in self._tried if each.size_bytes <= max(most_bytes, least)]
            return min(fitting, key=lambda each: each.summary.kld_mean or 0.0)
        fitting = [e for e in self._tried if budget.read_most(e.summary) <= budget.limit]
        return min(fitting, key=lambda each: (each.size_bytes, each.summary.kld_mean or 0.0))


def find_hull(points: Mapping[K, tuple[int, float]]) -> list[K]:
    """Find the keys of points on the lower convex hull of size and cost, by rising size."""
    hull: list[K] = []

    def fall(a: K, b: K) -> float:
        (size, cost), (larger, less) = points[a], points[b]
        return (cost - less) / (larger - size)

    for name in sorted(points, key=lambda key: points[key]):
        if hull and points[name][1] >= points[hull[-1]][1]:
            continue
        while len(hull) > 1 and fall(hull[-2], hull[-1]) <= fall(hull[-1], name):
            hull.pop()
        hull.append(name)
    return hull


def list_frontier(groups: Sequence[Group]) -> list[Sum]:
    """List the best sums by rising size and falling cost: no other of at most a size costs less.

    It extends the undominated plans of the first groups by each choice of the next one (Nemhauser
    and Ullmann, Management Science 15, 1969). Of very many, the best in equal steps of the size
    are kept.
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


def list_near(groups: Sequence[Group], picks: Picks, limit: float) -> Iterator[Picks]:
    """List plans that differ in one or two groups and fit in `limit` bytes, the best first."""
    size = sum(group.choices[c].size_bytes for group, c in zip(groups, picks, strict=True))
    moves: list[tuple[float, int, dict[int, int]]] = []
    for g, group in enumerate(groups):
        own = group.choices[picks[g]]
        for c, other in enumerate(group.choices):
            if other is not own:
                grown = other.size_bytes - own.size_bytes
                moves.append((other.kld_mean - own.kld_mean, grown, {g: c}))
    pairs = [
        (a[0] + b[0], a[1] + b[1], a[2] | b[2])
        for a, b in combinations(moves, 2)
        if a[2].keys() != b[2].keys()
    ]
    for _, grown, changes in sorted(moves + pairs, key=lambda move: move[:2]):
        if size + grown <= limit:
            yield tuple(changes.get(g, c) for g, c in enumerate(picks))


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
    return replace(group, choices=(plain, replace(stored, plan=plan)))


def _make_group(units: tuple[Unit, ...], schemes: Iterable[str], *, of: int) -> Group:
    """Make the group of units, `of` so many; a scheme that one cannot have leaves it in 16 bits."""
    layers = sorted({layer for unit in units for layer in unit.layers})
    kind = "KV caches" if units[0].sites else "linears"
    named = {1: units[0].name, of: f"all {kind}"}
    name = named.get(len(units), f"{kind} of {name_ranges(layers)}" if layers else f"other {kind}")
    plans: dict[str, Plan] = {IN_16_BITS: {}}
    plans |= {each: join_plans(unit.plan(each) for unit in units) for each in schemes}
    choices = (
        Choice(name=each, size_bytes=count_bytes(units, plan), plan=plan)
        for each, plan in plans.items()
        if plan or each == IN_16_BITS
    )
    return Group(name=name, units=units, choices=tuple(choices))
