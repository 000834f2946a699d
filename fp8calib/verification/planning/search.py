"""Search for a plan: estimate or measure groups alone, add, then measure whole plans.

Sums of groups only choose which plans are measured. What a plan costs is always a run of the whole
plan, and the plan that the caller gets is the best of those that were run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from statistics import median
from typing import Protocol

import numpy as np
import torch

from fp8calib.verification.planning.arrays import Costs, Floats, Plan, make_costs
from fp8calib.verification.planning.choices import Group, alone, count_bytes
from fp8calib.verification.planning.frontier import Frontier, find_frontier, list_changes, repair
from fp8calib.verification.score import count_in_rounds
from fp8calib.verification.summary import Summary, average, summarize
from fp8calib.verification.text_runs import fit_in_rounds
from fp8calib.verification.token_scores import TokenScores, split_sequences

_LAYERS_SHARE = 0.75
"""The share of a pass that is spent in the layers; the head takes the rest."""
_SINGLES_SHARE = 0.5
"""The share of the passes that groups alone may take."""
_SURE = 3.0
"""Standard errors from which two groups are taken to add to each other."""
_ROUNDS = 6
"""Plans that are tried for a budget of loss, at most."""
_SAFE = (0.5, 0.8)
"""The share of a budget of loss that the last plan is tried for where none kept to it: where up to
two plans are tried, and where more are."""
_NEAR = 1.25
"""A uniform scheme is run beside the plan unless its sum is more than this multiple of the plan's.
"""
_NEIGHBOURS = 8
"""Plans beside the best one that are run together, while that finds a better one."""
_FEWEST = 4
"""Groups of a scheme that were measured, from which the others' estimates are corrected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What limits the plan: bytes of all groups, a mean divergence, or a log ratio."""

    most_bytes: float | None = None
    most_kld: float | None = None
    most_log_ratio: float | None = None

    def read(self, summary: Summary) -> float:
        """Give the figure that a loss limits, and a standard error more: other text may differ."""
        if self.most_log_ratio is not None:
            return summary.log_ratio + (summary.log_ratio_se or 0.0)
        assert summary.kld_mean is not None  # noqa: S101 -- of an emulation it is always known
        return summary.kld_mean + (summary.kld_se or 0.0)

    @property
    def most_loss(self) -> float | None:
        """The limit of a loss; None where bytes are limited."""
        return self.most_kld if self.most_log_ratio is None else self.most_log_ratio


class RunPlans(Protocol):
    """Runs plans on one text beside the unquantized model."""

    @property
    def lengths(self) -> Sequence[int]:
        """The tokens of each sequence."""

    def __call__(self, plans: Iterable[Plan]) -> Mapping[Plan, tuple[TokenScores, TokenScores]]:
        """Give the scores of each plan, and those of the unquantized model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a choice costs alone."""

    kld_mean: float
    kld_se: float | None
    is_measured: bool


@dataclass(slots=True, kw_only=True)
class Found:
    """The plan, and what it was chosen by."""

    plan: Plan
    costs: Mapping[tuple[int, int], Cost]
    """By group and choice, without those in 16 bits."""
    arrays: Costs
    frontier: Frontier
    price: float = 0.0
    """Nats that a byte more would have saved, at the plan."""
    scale: float = 1.0
    """What whole plans lose, as a multiple of the sum of their groups."""
    runs: dict[Plan, Summary] = field(default_factory=dict)
    """All whole plans that were run."""

    def predict(self, plan: Plan) -> float:
        """Estimate what a whole plan costs."""
        return self.scale * self.arrays.add(self.arrays.locate(plan))

    def list_between(self, count: int) -> list[Plan]:
        """List plans on the frontier, at equal steps of the size."""
        low, high = (float(self.frontier.sizes[i]) for i in (0, -1))
        sizes = [low + (high - low) * step / (count + 1) for step in range(1, count + 1)]
        found = (self.frontier.find(size) for size in sizes)
        return list(dict.fromkeys(plan for plan in found if plan is not None))


class Search:
    """Searches on one text."""

    def __init__(
        self,
        groups: Sequence[Group],
        slopes: Mapping[tuple[int, int], torch.Tensor],
        run: RunPlans,
        *,
        passes: float,
        num_layers: int,
    ) -> None:
        """Search with the derivatives of `estimate`; groups without one are measured.

        A search takes at most `passes`, which are 2 or more, and those of groups without one.
        """
        self._groups = groups
        self._slopes = slopes
        self._run = run
        self._num_layers = num_layers
        self._passes = self._left = passes
        self._priced: Found | None = None
        self.spent = 0.0
        """Forward passes that were run."""

    def search(self, budget: Budget, uniform: Iterable[Plan]) -> Found:
        """Find the plan for a budget; `uniform` are run too where they may be as good."""
        self._left = self._passes
        priced = self._priced = self._priced or self._price()
        found = replace(priced, price=0.0)
        if budget.most_bytes is not None:
            found.plan = self._spend(found, budget.most_bytes, list(uniform))
        else:
            found.plan = self._save(found, budget, list(uniform))
        found.price = _find_price(found.frontier, count_bytes(self._groups, found.plan))
        return found

    def _price(self) -> Found:
        """Price the groups alone, and add up all plans."""
        costs = self._price_groups()
        arrays = self._make_arrays(costs)
        frontier = find_frontier(arrays.split(arrays.sizes), arrays.split(arrays.alone))
        start = frontier.plan(len(frontier.sizes) - 1)
        return Found(plan=start, costs=costs, arrays=arrays, frontier=frontier)

    # --- groups alone ---------------------------------------------------------------------------

    def _price_groups(self) -> dict[tuple[int, int], Cost]:
        """Estimate all choices, and measure those that cost most, as far as the passes go."""
        costs = {  # half the mean square of a derivative
            place: self._cost(slope.double().square() / 2, is_measured=False)
            for place, slope in self._slopes.items()
        }
        places = [
            (g, c) for g, each in enumerate(self._groups) for c in range(1, len(each.choices))
        ]
        needed = [place for place in places if place not in costs]
        chosen = self._choose_measured(costs)
        self._left -= self._count_alone(chosen)
        self.spent += self._count_alone([*needed, *chosen])
        plans = {place: alone(self._groups, *place) for place in [*needed, *chosen]}
        runs = self._run(plans.values())
        measured = {
            place: self._cost(runs[plan][0].klds, is_measured=True) for place, plan in plans.items()
        }
        return self._correct(costs, measured) | measured

    def _cost(self, klds: torch.Tensor, *, is_measured: bool) -> Cost:
        kld_mean, kld_se = average(klds, self._run.lengths)
        return Cost(kld_mean=kld_mean, kld_se=kld_se, is_measured=is_measured)

    def _count_alone(self, places: Sequence[tuple[int, int]]) -> float:
        """Count the passes of groups alone, with the unquantized model's beside them."""
        num_references = count_in_rounds(len(places)) - len(places)
        return sum(map(self._weigh, places)) + num_references

    def _weigh(self, place: tuple[int, int]) -> float:
        """Give the share of a pass that a group alone takes: it begins at its first layer."""
        first = min(self._groups[place[0]].layers, default=0)
        return 1 - _LAYERS_SHARE * first / self._num_layers

    def _choose_measured(self, costs: Mapping[tuple[int, int], Cost]) -> list[tuple[int, int]]:
        """Choose what is worth a run: the largest estimates of choices that are not dominated."""
        room = self._left * _SINGLES_SHARE
        chosen: list[tuple[int, int]] = []
        for place in sorted(costs, key=lambda each: -costs[each].kld_mean):
            if self._is_dominated(place, costs):
                continue
            if self._count_alone([*chosen, place]) > room:
                break
            chosen.append(place)
        return chosen

    def _is_dominated(self, place: tuple[int, int], costs: Mapping[tuple[int, int], Cost]) -> bool:
        """Tell whether another choice of the group is smaller and costs less."""
        group, own = place
        choices = self._groups[group].choices
        others = (c for c in range(1, len(choices)) if c != own and (group, c) in costs)
        return any(
            choices[c].size_bytes <= choices[own].size_bytes
            and costs[group, c].kld_mean < costs[place].kld_mean
            for c in others
        )

    def _correct(
        self, costs: Mapping[tuple[int, int], Cost], measured: Mapping[tuple[int, int], Cost]
    ) -> dict[tuple[int, int], Cost]:
        """Multiply estimates by what the measured ones of the same choice are off by."""
        ratios: dict[str, list[float]] = {}
        for place in costs.keys() & measured.keys():
            if costs[place].kld_mean > 0:
                ratio = measured[place].kld_mean / costs[place].kld_mean
                ratios.setdefault(self._name(place), []).append(ratio)
        everything = [each for found in ratios.values() for each in found]
        usual = median(everything) if len(everything) >= _FEWEST else 1.0

        def correct(place: tuple[int, int], cost: Cost) -> Cost:
            own = ratios.get(self._name(place), [])
            factor = median(own) if len(own) >= _FEWEST else usual
            se = None if cost.kld_se is None else cost.kld_se * factor
            return Cost(kld_mean=cost.kld_mean * factor, kld_se=se, is_measured=False)

        return {place: correct(place, cost) for place, cost in costs.items()}

    def _name(self, place: tuple[int, int]) -> str:
        group, choice = place
        return self._groups[group].choices[choice].name

    def _make_arrays(self, costs: Mapping[tuple[int, int], Cost]) -> Costs:
        sizes = [[each.size_bytes for each in group.choices] for group in self._groups]
        means = [
            [costs[g, c].kld_mean if c else 0.0 for c in range(len(group.choices))]
            for g, group in enumerate(self._groups)
        ]
        return make_costs(sizes, means, self._find_joint())

    def _find_joint(self) -> Floats | None:
        """Find what choices in the same and in neighbouring layers add to each other.

        It is the mean product of their derivatives, where that is beyond its error.
        """
        places = [(g, c) for g, each in enumerate(self._groups) for c in range(len(each.choices))]
        known = [i for i, place in enumerate(places) if place in self._slopes]
        lengths = self._run.lengths
        if not known or len(lengths) < 2:
            return None
        slopes = torch.stack([self._slopes[places[i]].double() for i in known], 1)
        parts = list(split_sequences(slopes, lengths))
        products = [(part.T @ part).numpy() for part in parts]
        mean = sum(products) / len(slopes)
        residuals = [one - mean * len(part) for one, part in zip(products, parts, strict=True)]
        clusters = len(parts) / (len(parts) - 1)
        error = np.sqrt(sum(each**2 for each in residuals) * clusters) / len(slopes)
        group_of = np.array([places[i][0] for i in known])
        layers = [self._groups[group].layers for group in group_of]
        first, last = (np.array([f(each, default=-9) for each in layers]) for f in (min, max))
        is_near = (first[:, None] <= last[None, :] + 1) & (first[None, :] <= last[:, None] + 1)
        is_other = group_of[:, None] != group_of[None, :]
        kept = np.where(is_near & is_other & (np.abs(mean) > _SURE * error), mean, 0.0)
        joint = np.zeros((len(places), len(places)))
        joint[np.ix_(known, known)] = kept
        return joint

    # --- whole plans ----------------------------------------------------------------------------

    def _run_whole(self, found: Found, plans: Iterable[Plan]) -> None:
        """Run plans that were not run yet, as far as the passes go; see what sums are off by.

        The one that quantizes nothing is the model that ran beside the others.
        """
        new = [plan for plan in dict.fromkeys(plans) if plan not in found.runs]
        quantized = [plan for plan in new if any(plan)][: fit_in_rounds(self._left)]
        passes = count_in_rounds(len(quantized))
        self.spent += passes
        self._left -= passes
        plain = (plan for plan in new if not any(plan))
        for plan, (scores, reference) in self._run([*quantized, *plain]).items():
            found.runs[plan] = summarize(scores, reference, self._run.lengths)
        ratios = [
            (summary.kld_mean or 0.0) / added
            for plan, summary in found.runs.items()
            if (added := found.arrays.add(found.arrays.locate(plan))) > 0
        ]
        found.scale = median(ratios) if ratios else 1.0

    def _spend(self, found: Found, limit: float, uniform: Sequence[Plan]) -> Plan:
        """Find the least loss of at most `limit` bytes."""
        start = found.frontier.find(limit)
        if start is None:
            start = found.frontier.plan(0)
            limit = float(found.frontier.sizes[0])
        plans = [repair(start, found.arrays, limit), start]
        self._run_whole(found, plans)
        self._run_whole(found, self._list_rivals(found, limit, uniform))
        best = self._find_least(found, limit)
        while (room := min(fit_in_rounds(self._left), _NEIGHBOURS)) > 0:
            near = list_changes(best, found.arrays, limit, count=room + len(found.runs))
            self._run_whole(found, [plan for plan in near if plan not in found.runs][:room])
            better = self._find_least(found, limit)
            if better == best:
                break
            best = better
        return best

    def _find_least(self, found: Found, limit: float) -> Plan:
        """Find the plan with the least loss of those that were run and fit."""
        fitting = [plan for plan in found.runs if count_bytes(self._groups, plan) <= limit]
        return min(fitting, key=lambda plan: found.runs[plan].kld_mean or 0.0)

    def _list_rivals(self, found: Found, limit: float, uniform: Sequence[Plan]) -> list[Plan]:
        """List the uniform plans that fit and may be as good."""
        best = min(found.predict(plan) for plan in found.runs)
        return [
            plan
            for plan in uniform
            if count_bytes(self._groups, plan) <= limit and found.predict(plan) <= _NEAR * best
        ]

    def _save(self, found: Found, budget: Budget, uniform: Sequence[Plan]) -> Plan:
        """Find the least bytes with at most the loss of the budget."""
        most = budget.most_loss
        assert most is not None  # noqa: S101 -- the caller asked
        frontier = found.frontier
        sizes = [float(size) for size in frontier.sizes]
        nothing = best = (0,) * len(self._groups)
        low, high = 0, len(sizes) - (frontier.plan(-1) == nothing)
        factor = 1.0
        tries = min(_ROUNDS, int(self._left) // count_in_rounds(1))
        for left in reversed(range(tries)):
            if low >= high:
                break
            wanted = most / factor
            if not left and best == nothing:
                wanted *= _SAFE[tries > 2]
            sums = [float(cost) for cost in frontier.costs[low:high]]
            index = low + sum(each > wanted for each in sums)
            index = min(max(index, low), high - 1)
            plan = repair(frontier.plan(index), found.arrays, sizes[index])
            self._run_whole(found, [plan])
            loss = budget.read(found.runs[plan])
            if loss <= most:
                best, high = plan, index
            else:
                low = index + 1
            if loss > 0 and frontier.costs[index] > 0:
                factor = loss / float(frontier.costs[index])
        limit = count_bytes(self._groups, best) - 1
        smaller = [p for p in uniform if count_bytes(self._groups, p) <= limit]
        near = [
            p for p in smaller if found.arrays.add(found.arrays.locate(p)) * factor <= _NEAR * most
        ]
        self._run_whole(found, [best, *near])
        fitting = [p for p in found.runs if budget.read(found.runs[p]) <= most]
        return min(fitting, key=lambda plan: count_bytes(self._groups, plan))


def _find_price(frontier: Frontier, size: float) -> float:
    """Give what a byte more would save at a size: the slope of the lower convex hull there."""
    hull = [0]
    for index in range(1, len(frontier.sizes)):
        while len(hull) > 1 and _slope(frontier, hull[-2], hull[-1]) >= _slope(
            frontier, hull[-1], index
        ):
            hull.pop()
        hull.append(index)
    above = ((a, b) for a, b in pairwise(hull) if float(frontier.sizes[b]) > size)
    found = next(above, None)
    return 0.0 if found is None else -_slope(frontier, *found)


def _slope(frontier: Frontier, first: int, last: int) -> float:
    fall = float(frontier.costs[last] - frontier.costs[first])
    return fall / float(frontier.sizes[last] - frontier.sizes[first])
