"""The best plans of every size, against an enumeration of all plans."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from fp8calib.verification.planning import frontier
from fp8calib.verification.planning.arrays import Costs, make_costs
from fp8calib.verification.planning.frontier import find_frontier, repair


@dataclass(frozen=True)
class Drawn:
    """A random problem, and all of its plans."""

    sizes: list[list[int]]
    costs: list[list[float]]
    joint: Any

    @property
    def plans(self) -> list[tuple[int, ...]]:
        """All of them."""
        return list(itertools.product(*(range(len(each)) for each in self.sizes)))

    def size(self, plan: tuple[int, ...]) -> int:
        """Add sizes."""
        return sum(each[c] for each, c in zip(self.sizes, plan, strict=True))

    def cost(self, plan: tuple[int, ...], *, is_joint: bool = False) -> float:
        """Add costs."""
        total = sum(each[c] for each, c in zip(self.costs, plan, strict=True))
        starts = np.cumsum([0, *map(len, self.sizes)])[:-1]
        places = [int(start) + c for start, c in zip(starts, plan, strict=True)]
        pairs = itertools.combinations(places, 2) if is_joint else ()
        return total + sum(float(self.joint[i, j]) for i, j in pairs)

    def arrays(self) -> Costs:
        """Give it to the code under test."""
        return make_costs(self.sizes, self.costs, self.joint)


def draw(seed: int, groups: int = 6) -> Drawn:
    random = np.random.default_rng(seed)
    counts = [int(random.integers(1, 4)) for _ in range(groups)]
    sizes = [[int(x) for x in random.integers(1, 40, count)] for count in counts]
    costs = [[float(x) for x in random.random(count)] for count in counts]
    half = random.normal(size=(sum(counts), sum(counts))) / 20
    joint = half + half.T
    group = np.repeat(np.arange(groups), counts)
    joint[group[:, None] == group[None, :]] = 0
    return Drawn(sizes, costs, joint)


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_at_most_the_size_costs_less(seed: int) -> None:
    drawn = draw(seed)
    frontier = find_frontier(drawn.sizes, drawn.costs)
    smallest = min(map(drawn.size, drawn.plans))
    assert frontier.find(smallest - 1) is None
    for limit in range(smallest, max(map(drawn.size, drawn.plans)) + 2):
        plan = frontier.find(limit)
        assert plan is not None
        assert drawn.size(plan) <= limit
        best = min(drawn.cost(each) for each in drawn.plans if drawn.size(each) <= limit)
        assert drawn.cost(plan) == pytest.approx(best, abs=1e-12)


def test_the_frontier_rises_in_size_and_falls_in_cost() -> None:
    drawn = draw(3)
    frontier = find_frontier(drawn.sizes, drawn.costs)
    plans = [frontier.plan(index) for index in range(len(frontier.sizes))]
    assert [drawn.size(plan) for plan in plans] == frontier.sizes.tolist()
    assert np.allclose([drawn.cost(plan) for plan in plans], frontier.costs)
    assert (np.diff(frontier.sizes) > 0).all()
    assert (np.diff(frontier.costs) < 0).all()


def test_thinned_plans_stay_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(5, groups=9)
    drawn.costs[:] = [[1 / size for size in each] for each in drawn.sizes]
    exact = find_frontier(drawn.sizes, drawn.costs)
    monkeypatch.setattr(frontier, "MOST_STATES", 32)
    thin = find_frontier(drawn.sizes, drawn.costs)
    assert len(thin.sizes) <= 32 < len(exact.sizes)
    plans = [thin.plan(index) for index in range(len(thin.sizes))]
    assert [drawn.size(plan) for plan in plans] == thin.sizes.tolist()
    for size, cost in zip(thin.sizes, thin.costs, strict=True):
        step = (exact.sizes[-1] - exact.sizes[0]) * len(drawn.sizes) / 32
        near = exact.find(float(size) - step)
        assert near is None or cost <= drawn.cost(near) + 1e-12


@pytest.mark.parametrize("seed", range(12))
def test_repair_takes_joint_costs_into_account_and_keeps_the_limit(seed: int) -> None:
    drawn = draw(seed)
    frontier, arrays = find_frontier(drawn.sizes, drawn.costs), drawn.arrays()
    sizes = list(map(drawn.size, drawn.plans))
    worse, limits = 0, range(min(sizes), max(sizes) + 1, 3)
    for limit in limits:
        start = frontier.find(limit)
        assert start is not None
        plan = repair(start, arrays, limit)
        assert drawn.size(plan) <= limit
        cost = drawn.cost(plan, is_joint=True)
        assert arrays.add(arrays.locate(plan)) == pytest.approx(cost, abs=1e-12)
        assert cost <= drawn.cost(start, is_joint=True) + 1e-12
        fitting = [each for each in drawn.plans if drawn.size(each) <= limit]
        best = min(drawn.cost(each, is_joint=True) for each in fitting)
        worse += cost > best + 1e-9
    assert worse <= len(limits) / 3  # a local search may miss the best
