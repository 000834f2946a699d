"""A plan where nothing passes whole: which linears, or caches, stay in 16 bits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from fp8calib.errors import cut_list
from fp8calib.fp8.schemes import NEAREST
from fp8calib.jobs.auto.measure import Measured
from fp8calib.jobs.planning.measure import GRADIENT_PASSES, count_search, open_measured
from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.jobs.planning.recipe import PlannedScheme, make_planned_scheme
from fp8calib.jobs.planning.runs import MEASURED_NAME, Measurements
from fp8calib.recipe import Quantize
from fp8calib.results.auto import AnsweredQuestion
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.planning.choices import Group
from fp8calib.verification.planning.search import Budget, Found

_SHARES = (1.0, 0.5, 0.25)
"""Of what the gate allows: less where the text that is held out loses more."""
_MOST_LEFT = 0.5
"""At most this share of the bytes that can be saved stays in 16 bits."""
_SHOWN = 8


def count_left_passes(opened: OpenedPlan, schemes: Sequence[str]) -> int:
    """Count the forward passes over the text of the search that `plan_left` takes at most."""
    more = (len(_SHARES) - 1) * opened.request.passes
    return GRADIENT_PASSES + count_search(_open_left(opened, schemes)) + more


def _open_left(opened: OpenedPlan, schemes: Sequence[str]) -> OpenedPlan:
    kv_tokens = 0 if schemes else 1
    return replace(
        opened, request=replace(opened.request, scheme=tuple(schemes), kv_tokens=kv_tokens)
    )


def plan_left(
    measured: Measured, schemes: Sequence[str], folder: Path
) -> Iterator[tuple[PlannedScheme, AnsweredQuestion]]:
    """List plans that pass the gate on text that was calibrated on, the least bytes first.

    Without `schemes` the KV cache alone is planned.
    """
    opened = _open_left(measured.opened, schemes)
    measurements = Measurements(folder / MEASURED_NAME, opened.tag)
    most = math.log(GATES[measured.task.gate].pass_at)
    with open_measured(opened, measured.stats, measurements, measured.reporter) as plan:
        search = plan.open_search()
        founds = [search.search(Budget(most_log_ratio=most * share), ()) for share in _SHARES]
        for found in founds:
            saved = [
                each.choices[0].size_bytes - each.choices[choice].size_bytes
                for each, choice in zip(plan.groups, found.plan, strict=True)
            ]
            possible = (
                each.choices[0].size_bytes - min(c.size_bytes for c in each.choices)
                for each in plan.groups
            )
            if sum(saved) >= (1 - _MOST_LEFT) * sum(possible) > 0:
                planned = make_planned_scheme(plan.groups, found.plan, NEAREST)
                yield planned, _explain(plan.groups, found, planned, is_cache=not schemes)


def _explain(
    groups: Sequence[Group], found: Found, planned: PlannedScheme, *, is_cache: bool
) -> AnsweredQuestion:
    pairs = zip(groups, found.plan, strict=True)
    left = [g for g, choice in pairs if not choice and len(g.choices) > 1]
    summary = found.runs[found.plan]
    count = sum(len(group.choices) > 1 for group in groups)
    why = (
        f"of {count} groups they lose most for their bytes; with them in 16 bits the "
        f"perplexity ratio on the text of the search is {summary.ppl_ratio:.4f}"
    )
    if is_cache:
        layers = ", ".join(map(str, planned.plain_caches))
        question = "which layers keep their KV cache in 16 bits, so that it passes?"
        return AnsweredQuestion(question=question, answer=layers or "none", why=why)
    names = cut_list([group.name for group in left], _SHOWN) if left else "none"
    mixed = "" if planned.quantize is None else f"; schemes: {_name_schemes(planned.quantize)}"
    question = "which linears stay unquantized, so that FP8 inputs pass?"
    return AnsweredQuestion(question=question, answer=f"{names}{mixed}", why=why)


def _name_schemes(planned: Quantize) -> str:
    return ", ".join(dict.fromkeys([planned.scheme, *planned.layer_schemes.values()]))
