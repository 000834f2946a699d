"""The best plans of every size, against an enumeration of all plans."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest

from fp8calib.plugins.plan import search
from fp8calib.plugins.plan.search import Group, GroupChoice, Picks, Sum, list_frontier


@dataclass(frozen=True)
class Drawn:
    """A random problem, and all of its plans."""

    sizes: list[list[int]]
    costs: list[list[float]]

    @property
    def plans(self) -> list[Picks]:
        """All of them."""
        return list(itertools.product(*(range(len(each)) for each in self.sizes)))

    def size(self, plan: Picks) -> int:
        """Add sizes."""
        return sum(each[c] for each, c in zip(self.sizes, plan, strict=True))

    def cost(self, plan: Picks) -> float:
        """Add costs."""
        return sum(each[c] for each, c in zip(self.costs, plan, strict=True))

    @property
    def groups(self) -> list[Group]:
        """Give it to the code under test."""
        pairs = (zip(*each, strict=True) for each in zip(self.sizes, self.costs, strict=True))
        choices = (
            [GroupChoice(name="", size_bytes=size, plan={}, kld_mean=cost) for size, cost in each]
            for each in pairs
        )
        return [Group(name="", units=(), choices=tuple(each)) for each in choices]


def draw(seed: int, groups: int = 6) -> Drawn:
    random = np.random.default_rng(seed)
    counts = [int(random.integers(1, 4)) for _ in range(groups)]
    sizes = [[int(x) for x in random.integers(1, 40, count)] for count in counts]
    costs = [[float(x) for x in random.random(count)] for count in counts]
    return Drawn(sizes, costs)


def find(frontier: list[Sum], limit: float) -> Sum:
    return [each for each in frontier if each.size_bytes <= limit][-1]


@pytest.mark.parametrize("seed", range(12))
def test_no_plan_of_at_most_the_size_costs_less(seed: int) -> None:
    drawn = draw(seed)
    frontier = list_frontier(drawn.groups)
    smallest = min(map(drawn.size, drawn.plans))
    assert frontier[0].size_bytes == smallest
    for limit in range(smallest, max(map(drawn.size, drawn.plans)) + 2):
        plan = find(frontier, limit).picks
        assert drawn.size(plan) <= limit
        best = min(drawn.cost(each) for each in drawn.plans if drawn.size(each) <= limit)
        assert drawn.cost(plan) == pytest.approx(best, abs=1e-12)


def test_thinned_plans_stay_near_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = draw(5, groups=9)
    drawn.costs[:] = [[1 / size for size in each] for each in drawn.sizes]
    exact = list_frontier(drawn.groups)
    monkeypatch.setattr(search, "MOST_STATES", 32)
    thin = list_frontier(drawn.groups)
    assert len(thin) <= 32 < len(exact)
    step = (exact[-1].size_bytes - exact[0].size_bytes) * len(drawn.sizes) / 32
    for each in thin:
        assert drawn.size(each.picks) == each.size_bytes
        near = [other for other in exact if other.size_bytes <= each.size_bytes - step]
        assert not near or each.kld <= near[-1].kld + 1e-12
