"""The best plans for every size: one choice for each group, by dynamic programming.

Costs are added here. What groups do to each other is left to `repair`, which changes one or two
groups at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fp8calib.verification.planning.arrays import Costs, Floats, Ints, Plan

MOST_STATES = 2**15
"""Up to so many undominated plans of the groups so far are kept, and the result is exact. Of more,
the best in each of as many equal steps of the size is kept."""
_LEAST_GAIN = 1e-9
"""The share of the cost that a change has to save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Frontier:
    """The plans that no other plan of at most their size beats, by falling cost."""

    sizes: Ints
    """Bytes, rising: int64 [P]."""
    costs: Floats
    """fp64 [P]."""
    choices: Ints
    """The number of each group's choice: int64 [P, G]."""

    def find(self, size: float) -> Plan | None:
        """Give the plan of least cost of at most `size` bytes; None if all are larger."""
        index = int(np.searchsorted(self.sizes, size, side="right")) - 1
        return None if index < 0 else self.plan(index)

    def plan(self, index: int) -> Plan:
        """Give the plan at a place."""
        return tuple(int(choice) for choice in self.choices[index])


def find_frontier(sizes: Sequence[Sequence[int]], costs: Sequence[Sequence[float]]) -> Frontier:
    """Find the best plans: `sizes` and `costs` are those of each choice of each group.

    It extends the undominated plans of the first groups by each choice of the next one (Nemhauser
    and Ullmann, Management Science 15, 1969).
    """
    total, cost = np.zeros(1, np.int64), np.zeros(1)
    steps: list[tuple[Ints, Ints]] = []
    for own_sizes, own_costs in zip(sizes, costs, strict=True):
        choice = np.repeat(np.arange(len(own_sizes)), len(total))
        parent = np.tile(np.arange(len(total)), len(own_sizes))
        grown = total[parent] + np.asarray(own_sizes, np.int64)[choice]
        lost = cost[parent] + np.asarray(own_costs, np.float64)[choice]
        kept = _thin(grown, _list_undominated(grown, lost))
        total, cost = grown[kept], lost[kept]
        steps.append((choice[kept], parent[kept]))
    return Frontier(sizes=total, costs=cost, choices=_trace(steps, len(total)))


def _list_undominated(sizes: Ints, costs: Floats) -> Ints:
    """List the plans that cost less than all of at most their size, by rising size."""
    order = np.lexsort((costs, sizes))
    before = np.concatenate([[np.inf], np.minimum.accumulate(costs[order])[:-1]])
    found: Ints = order[costs[order] < before]
    return found


def _thin(sizes: Ints, kept: Ints) -> Ints:
    """Keep the last, and so the best, in each step of the size."""
    if len(kept) <= MOST_STATES:
        return kept
    held = sizes[kept]
    step = (held - held[0]) * MOST_STATES // (held[-1] - held[0] + 1)
    last: Ints = kept[np.append(step[1:] != step[:-1], True)]
    return last


def _trace(steps: Sequence[tuple[Ints, Ints]], count: int) -> Ints:
    """Follow each plan back to its choices."""
    choices = np.zeros((count, len(steps)), np.int64)
    place = np.arange(count)
    for group in range(len(steps) - 1, -1, -1):
        choice, parent = steps[group]
        choices[:, group] = choice[place]
        place = parent[place]
    return choices


def repair(plan: Plan, costs: Costs, limit: float) -> Plan:
    """Change one or two groups at a time while that lowers the cost, joint effects included.

    The size stays at most `limit` bytes. The best change is made first.
    """
    for _ in range(4 * len(plan)):
        better = list_changes(plan, costs, limit, count=1)
        before = costs.add(costs.locate(plan))
        if not better or costs.add(costs.locate(better[0])) >= before * (1 - _LEAST_GAIN):
            break
        plan = better[0]
    return plan


def list_changes(plan: Plan, costs: Costs, limit: float, *, count: int) -> list[Plan]:
    """List plans that differ in one or two groups and have at most `limit` bytes, the best first.

    At most `count`, by their cost with joint effects.
    """
    chosen = costs.locate(plan)
    gained = costs.price_changes(chosen)
    grown = costs.sizes - costs.sizes[chosen[costs.group_of]]
    pairs = gained[:, None] + gained[None, :] + costs.price_pairs(chosen)
    both = grown[:, None] + grown[None, :]
    pairs[costs.group_of[:, None] == costs.group_of[None, :]] = np.inf
    np.fill_diagonal(pairs, gained)
    np.fill_diagonal(both, grown)
    pairs[int(costs.sizes[chosen].sum()) + both > limit] = np.inf
    pairs[chosen], pairs[:, chosen] = np.inf, np.inf  # changes nothing
    pairs[np.tril_indices(len(pairs), -1)] = np.inf  # each pair once
    found = []
    for place in np.argsort(pairs, axis=None)[:count]:
        first, second = np.unravel_index(int(place), pairs.shape)
        if not np.isfinite(pairs[first, second]):
            break
        changed = chosen.copy()
        changed[costs.group_of[first]], changed[costs.group_of[second]] = first, second
        found.append(costs.name(changed))
    return found
