"""What plans cost, as arrays: each choice of each group has a place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Ints: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Floats: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Plan: TypeAlias = tuple[int, ...]
"""The number of the choice of each group; 0 leaves it unquantized."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Sizes and costs of P places in G groups, and what two places cost together."""

    group_of: Ints
    """The group of each place: int64 [P], rising."""
    first: Ints
    """The place of each group's first choice: int64 [G]."""
    sizes: Ints
    """Bytes of each place."""
    alone: Floats
    """The cost of each place alone: nats."""
    joint: Floats
    """What two places cost beyond that: [P, P], symmetric, 0 within a group."""

    def locate(self, plan: Plan) -> Ints:
        """Give the place of each group's choice."""
        return self.first + np.asarray(plan, np.int64)

    def name(self, chosen: Ints) -> Plan:
        """Give the plan of the places of all groups."""
        return tuple(int(each) for each in chosen - self.first)

    def split(self, values: Floats | Ints) -> list[list[Any]]:
        """Split values of places by group."""
        return [list(part) for part in np.split(values, self.first[1:])]

    def add(self, chosen: Ints) -> float:
        """Add the costs of the places of a plan, joint ones included."""
        return float(self.alone[chosen].sum() + self.joint[np.ix_(chosen, chosen)].sum() / 2)

    def price_changes(self, chosen: Ints) -> Floats:
        """Give what changing one group to each place adds."""
        own = chosen[self.group_of]
        beside = self.joint[:, chosen].sum(1)
        changed: Floats = self.alone - self.alone[own] + beside - beside[own]
        return changed

    def price_pairs(self, chosen: Ints) -> Floats:
        """Give what two changes add together beyond what each adds alone: [P, P]."""
        own = chosen[self.group_of]
        added: Floats = (
            self.joint - self.joint[:, own] - self.joint[own, :] + self.joint[np.ix_(own, own)]
        )
        return added


def make_costs(
    sizes: Sequence[Sequence[int]], alone: Sequence[Sequence[float]], joint: Floats | None = None
) -> Costs:
    """Make the arrays of what is given for each choice of each group."""
    counts = [len(each) for each in sizes]
    num_places = sum(counts)
    return Costs(
        group_of=np.repeat(np.arange(len(counts)), counts),
        first=np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64),
        sizes=np.array([size for each in sizes for size in each], np.int64),
        alone=np.array([cost for each in alone for cost in each], np.float64),
        joint=np.zeros((num_places, num_places)) if joint is None else joint,
    )
