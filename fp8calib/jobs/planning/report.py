"""The report of a plan: each group's choice with its reason, and the frontier."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from fp8calib.checkpoint.disk import format_size
from fp8calib.data.sequences import list_other_warnings
from fp8calib.engines.registry import find_replayed
from fp8calib.jobs.planning.budget import Sizes, find_limit, name_budget
from fp8calib.jobs.planning.opened import OpenedPlan
from fp8calib.jobs.planning.recipe import RECIPE_NAME, PlannedScheme, spell_serve
from fp8calib.jobs.text import warn_of_few
from fp8calib.machine.command_line import spell_command
from fp8calib.results.plan import FrontierPoint, GroupChoice, PlannedGroup, PlanResult
from fp8calib.results.record import BeforeAfter
from fp8calib.stats.fingerprint import versions
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.planning.arrays import Plan
from fp8calib.verification.planning.choices import Group, count_bytes
from fp8calib.verification.planning.search import Cost, Found
from fp8calib.verification.report import RunProvenance
from fp8calib.verification.summary import Summary, summarize
from fp8calib.verification.token_scores import TokenScores

_CHOSEN = "plan"
_SURE = 2.0
"""Standard errors beyond which two costs differ."""
Met = Literal["yes", "no", "cannot-tell"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """What a report is made of."""

    opened: OpenedPlan
    groups: Sequence[Group]
    sizes: Sizes
    found: Found
    planned: PlannedScheme
    judged: Mapping[str, Plan]
    """The plans that were run on the text that is held out, by name; the chosen one first."""
    scores: Mapping[Plan, tuple[TokenScores, TokenScores]]
    lengths: Sequence[int]
    spent: float
    write: str
    """The command that writes the checkpoint, or the overlay of a cache."""


def make_report(made: PlanReport) -> PlanResult:
    """Make the report."""
    opened, found = made.opened, made.found
    request = opened.request
    summaries = {plan: summarize(*both, made.lengths) for plan, both in made.scores.items()}
    summary, searched = summaries[found.plan], found.runs[found.plan]
    size = made.sizes.fixed + count_bytes(made.groups, found.plan)
    met, why = _judge(made, summary, size)
    alone = [found.costs[g, c].kld_mean for g, c in enumerate(found.plan) if c]
    engines = {engine.key: find_replayed(engine.key).version for engine in opened.engines}
    text = (opened.calibration, opened.held_out)
    warnings = (
        *(warning for each in text for warning in list_other_warnings(each)),
        *warn_of_few(made.opened.held_out.num_tokens),
    )
    return PlanResult(
        model=str(request.model),
        out=str(opened.out),
        engines=engines,
        emulated=opened.emulated.release,
        gpu="" if opened.gpu is None else opened.gpu.title,
        dtype=opened.model.dtype,
        device=opened.model.device,
        budget=name_budget(request),
        met=met,
        why=why,
        data=opened.held_out.sources,
        search_tokens=opened.search.num_tokens,
        tokens=summary.tokens,
        sequences=len(opened.held_out.sequences),
        kv_tokens=request.kv_tokens,
        bytes=BeforeAfter(before=made.sizes.unquantized, after=size),
        kld_mean=_kld(summary),
        kld_se=summary.kld_se,
        ppl_ratio=summary.ppl_ratio,
        ppl_ratio_se=summary.ppl_ratio_se,
        searched_kld=_kld(searched),
        summed_kld=math.fsum(alone),
        passes=made.spent,
        groups=tuple(_list_groups(made)),
        frontier=tuple(_list_points(made, summaries)),
        recipe=RECIPE_NAME,
        write=made.write,
        serve=spell_serve(opened, made.planned),
        provenance=RunProvenance(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=spell_command(),
            model_hash=opened.target.fingerprint,
            data_hash=opened.held_out.fingerprint,
            versions=versions(opened.held_out.tokens_by_modality),
        ),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _kld(summary: Summary) -> float:
    assert summary.kld_mean is not None  # noqa: S101 -- of an emulation it is always known
    return summary.kld_mean


def _judge(made: PlanReport, summary: Summary, size: int) -> tuple[Met, str]:
    """Judge the budget on the text that is held out."""
    request = made.opened.request
    limit = find_limit(request, made.sizes)
    sizes = f"{format_size(size)} of {format_size(made.sizes.unquantized)}{_name_caches(made)}"
    kld = f"KLD {format_mean_kld(summary.kld_mean, summary.kld_se)}"
    if request.max_bytes is not None:
        is_met = size <= limit
        what = "fits" if is_met else f"more than {format_size(int(limit))}, and nothing is smaller"
        return ("yes" if is_met else "no"), f"{sizes}, {kld}: {what}"
    loss, se, name = _kld(summary), summary.kld_se, "KLD"
    if request.max_ratio is not None:
        loss, se, name = summary.ppl_ratio, summary.ppl_ratio_se, "perplexity ratio"
    shown = f"{loss:.4f} ± {'?' if se is None else f'{se:.4f}'}"
    if se is None:
        return "cannot-tell", f"{sizes}, {name} {shown}: its error is unknown"
    if loss + se <= limit:
        return "yes", f"{sizes}, {name} {shown}: at most {limit:g}"
    if loss - se > limit:
        return "no", f"{sizes}, {name} {shown}: more than {limit:g} on text that is held out"
    return "cannot-tell", f"{sizes}, {name} {shown}: too little text to tell it from {limit:g}"


def _name_caches(made: PlanReport) -> str:
    """Name the part of the bytes that is no weight; empty where caches do not count."""
    pairs = zip(made.groups, made.found.plan, strict=True)
    caches = [(each, choice) for each, choice in pairs if each.is_cache]
    if not caches:
        return ""
    plain = format_size(sum(each.choices[0].size_bytes for each, _ in caches))
    size = format_size(sum(each.choices[choice].size_bytes for each, choice in caches))
    return f" (KV cache of {made.opened.request.kv_tokens:,} tokens: {size} of {plain})"


def _list_groups(made: PlanReport) -> Iterator[PlannedGroup]:
    for g, (group, chosen) in enumerate(zip(made.groups, made.found.plan, strict=True)):
        costs = {c: made.found.costs[g, c] for c in range(1, len(group.choices))}
        yield PlannedGroup(
            name=group.name,
            layers=group.layers,
            linears=group.linears,
            choice=group.choices[chosen].name,
            saved_bytes=group.choices[0].size_bytes - group.choices[chosen].size_bytes,
            why=_explain(group, chosen, costs, made.found.price),
            choices=tuple(
                GroupChoice(
                    name=group.choices[c].name,
                    size_bytes=group.choices[c].size_bytes,
                    kld_mean=cost.kld_mean,
                    kld_se=cost.kld_se,
                    how="measured" if cost.is_measured else "estimated",
                )
                for c, cost in costs.items()
            ),
            refused=dict(group.refused),
        )


def _explain(group: Group, chosen: int, costs: Mapping[int, Cost], price: float) -> str:
    """Say why a group has its choice."""
    if not costs:
        return next(iter(group.refused.values()), "nothing else can be chosen")
    if not chosen:
        best = min(costs, key=lambda c: _price(group, c, costs[c]))
        spelled = _spell_price(group, best, costs[best])
        return f"{group.choices[best].name}: {spelled}; the plan pays {_per_gb(price)}"
    text = _spell_price(group, chosen, costs[chosen])
    own = group.choices[chosen]
    rivals = [
        c for c in costs if c != chosen and group.choices[c].size_bytes <= 1.02 * own.size_bytes
    ]
    alike = [group.choices[c].name for c in rivals if not _differs(costs[c], costs[chosen])]
    if alike:
        return f"{text}; {', '.join(alike)}: cannot tell"
    if rivals:
        nearest = min(rivals, key=lambda c: costs[c].kld_mean)
        return f"{text}; {group.choices[nearest].name} {_kld_of(costs[nearest])}"
    return text


def _differs(one: Cost, other: Cost) -> bool:
    error = math.hypot(one.kld_se or math.inf, other.kld_se or math.inf)
    return abs(one.kld_mean - other.kld_mean) > _SURE * error


def _price(group: Group, choice: int, cost: Cost) -> float:
    saved = group.choices[0].size_bytes - group.choices[choice].size_bytes
    return cost.kld_mean / saved if saved > 0 else math.inf


def _spell_price(group: Group, choice: int, cost: Cost) -> str:
    saved = group.choices[0].size_bytes - group.choices[choice].size_bytes
    return f"KLD {_kld_of(cost)} for {format_size(saved)}, {_per_gb(_price(group, choice, cost))}"


def _kld_of(cost: Cost) -> str:
    return format_mean_kld(cost.kld_mean, cost.kld_se)


def _per_gb(price: float) -> str:
    return f"{price * 1e9:.2g} nats per GB"


def _list_points(made: PlanReport, summaries: Mapping[Plan, Summary]) -> Iterator[FrontierPoint]:
    """List the plans that were run, each once, by size."""
    klds = {name: made.scores[plan][0].klds for name, plan in made.judged.items()}
    seen: set[Plan] = set()
    points = []
    for name, plan in made.judged.items():
        if plan in seen:
            continue
        seen.add(plan)
        summary = summaries[plan]
        is_chosen = plan == made.found.plan
        pair = None if is_chosen else compare_paired(name, _CHOSEN, klds, made.lengths)
        points.append(
            FrontierPoint(
                name=name,
                size_bytes=made.sizes.fixed + count_bytes(made.groups, plan),
                kld_mean=_kld(summary),
                kld_se=summary.kld_se,
                ppl_ratio=summary.ppl_ratio,
                ppl_ratio_se=summary.ppl_ratio_se,
                is_uniform=_is_uniform(made.groups, plan),
                is_chosen=is_chosen,
                against_chosen=pair,
            )
        )
    yield from sorted(points, key=lambda point: point.size_bytes)


def _is_uniform(groups: Sequence[Group], plan: Plan) -> bool:
    """Tell whether all linears have one choice, and all caches."""
    names = [(g.is_cache, g.choices[c].name) for g, c in zip(groups, plan, strict=True)]
    return all(len({name for kind, name in names if kind is of}) <= 1 for of in (False, True))
