"""The report of a plan: each group's choice and reason, the frontier, the loss on other text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Literal

from fp8calib.calibration.fingerprint import versions
from fp8calib.checkpoint.output import format_size
from fp8calib.commands.command_line import spell_command
from fp8calib.commands.result import BeforeAfter, Result
from fp8calib.data.sequences import FEW_TOKENS
from fp8calib.engines.registry import find_replayed
from fp8calib.errors import CANNOT_TELL, VerificationError
from fp8calib.model.geometry import Frozen
from fp8calib.numerics.rules import AMAX
from fp8calib.plugins.plan.choices import (
    IN_16_BITS,
    Choices,
    Plan,
    choice_of,
    count_bytes,
    list_uniform,
)
from fp8calib.plugins.plan.inputs import OpenedPlan
from fp8calib.plugins.plan.measure import Measure
from fp8calib.plugins.plan.recipe import RECIPE_NAME, PlannedScheme, spell_serve, spell_write
from fp8calib.plugins.plan.search import Group, GroupChoice, Search, Tried
from fp8calib.verification.report import PairedResult, RunProvenance
from fp8calib.verification.summary import compare_paired, summarize
from fp8calib.verification.tables import format_mean_kld

CHOSEN = "plan"
_FIGURES = ("kld_mean", "kld_se", "ppl_ratio", "ppl_ratio_se")
Met = Literal["yes", "no", "cannot-tell"]


class PlannedGroup(Frozen):
    """What is decided together, and what was chosen for it."""

    name: str
    layers: tuple[int, ...]
    linears: tuple[str, ...]
    """As the checkpoint names them; empty for a KV cache."""
    choice: str
    rules: Mapping[str, str]
    """Rules other than amax, by site of K or V."""
    saved_bytes: int
    """Against 16 bits."""
    why: str
    choices: tuple[GroupChoice, ...]
    """All but 16 bits, which costs nothing."""
    refused: Mapping[str, str]
    """Why other schemes are no choices."""


class FrontierPoint(Frozen):
    """A plan that was measured on the text that is held out."""

    name: str
    size_bytes: int
    kld_mean: float
    kld_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    is_uniform: bool
    """One scheme for all linears, and amax for all caches."""
    is_chosen: bool
    against_chosen: PairedResult | None
    """The plan against the chosen one; null of that itself."""


class PlanResult(Result):
    """All results."""

    kind: Literal["plan"] = "plan"
    model: str
    out: str
    engines: Mapping[str, str]
    """Their versions."""
    emulated: str
    """Whose arithmetic the figures have."""
    gpu: str
    dtype: str
    device: str
    budget: str
    """In words."""
    met: Met
    why: str
    data: tuple[str, ...]
    search_tokens: int
    tokens: int
    """Scored tokens of the text that is held out."""
    sequences: int
    """Its sequences: of few, only large differences can be told."""
    kv_tokens: int
    bytes: BeforeAfter
    kld_mean: float
    kld_se: float | None
    ppl_ratio: float
    ppl_ratio_se: float | None
    searched_kld: float
    """The loss on the text of the search."""
    summed_kld: float | None
    """The sum of the groups' losses there; null where one was not measured alone."""
    passes: int
    """Forward passes over the text of the search that this run took, the unquantized model's too.
    """
    groups: tuple[PlannedGroup, ...]
    frontier: tuple[FrontierPoint, ...]
    recipe: str
    """The file, relative to `out`."""
    write: str
    """The command that writes the checkpoint, or the overlay of a cache alone."""
    serve: str
    """The command that serves it; empty where the engine has none."""
    provenance: RunProvenance
    warnings: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether held-out text confirms the budget."""
        return self.met == "yes"

    @property
    def exit_code(self) -> int:
        """8 if the budget is not met; 9 if that cannot be told."""
        codes = {"yes": 0, "no": VerificationError.exit_code, "cannot-tell": CANNOT_TELL}
        return codes[self.met]


def make_report(
    opened: OpenedPlan,
    choices: Choices,
    search: Search,
    best: Tried,
    planned: PlannedScheme,
    judged: Mapping[str, Plan],
    held_out: Measure,
) -> PlanResult:
    """Make the report on plans, by name, that were run on the text that is held out.

    The first one, `CHOSEN`, is the best of the search.
    """
    request = opened.request
    points = sorted(_list_points(choices, judged, held_out), key=lambda point: point.size_bytes)
    (chosen,) = (point for point in points if point.is_chosen)
    met, why = _judge(opened, choices, best, chosen)
    tokens = opened.held_out.num_tokens
    texts = (opened.calibration, opened.held_out)
    warnings = [warning for text in texts for warning in text.warnings]
    if tokens < FEW_TOKENS:
        few = f"only {tokens} tokens are held out, fewer than {FEW_TOKENS}"
        warnings.append(f"{few}: figures are imprecise")
    return PlanResult(
        model=str(request.model),
        out=str(opened.out),
        engines={each.key: find_replayed(each.key).version for each in opened.engines},
        emulated=opened.emulated.release,
        gpu="" if opened.gpu is None else opened.gpu.title,
        dtype=opened.model.dtype,
        device=opened.model.device,
        budget=opened.budget.name,
        met=met,
        why=why,
        data=opened.held_out.sources,
        search_tokens=opened.search.num_tokens,
        tokens=len(held_out.reference.logprobs),
        sequences=len(opened.held_out.sequences),
        kv_tokens=request.kv_tokens,
        bytes=BeforeAfter(before=choices.unquantized_bytes, after=best.size_bytes),
        **{name: getattr(chosen, name) for name in _FIGURES},
        searched_kld=best.kld,
        summed_kld=_sum_groups(search, best.plan),
        passes=search.measure.passes,
        groups=tuple(_list_groups(search, best.plan)),
        frontier=tuple(points),
        recipe=RECIPE_NAME,
        write=spell_write(opened, planned),
        serve=spell_serve(opened, planned),
        provenance=RunProvenance(
            date=datetime.now(UTC).isoformat(timespec="seconds"),
            command=spell_command(),
            model_hash=opened.target.fingerprint,
            data_hash=opened.held_out.fingerprint,
            versions=versions(opened.held_out.tokens_by_modality),
        ),
        warnings=tuple(dict.fromkeys(warnings)),
    )


def _judge(
    opened: OpenedPlan, choices: Choices, best: Tried, chosen: FrontierPoint
) -> tuple[Met, str]:
    """Judge the budget on the text that is held out."""
    budget, size = opened.budget, best.size_bytes
    shown = f"{format_size(size)} of {format_size(choices.unquantized_bytes)}"
    if caches := [unit for unit in choices.units if unit.sites]:
        plain = format_size(count_bytes(caches, {}))
        stored = format_size(count_bytes(caches, best.plan))
        shown += f" (KV cache of {opened.request.kv_tokens:,} tokens: {stored} of {plain})"
    if budget.kind == "bytes":
        shown += f", KLD {format_mean_kld(chosen.kld_mean, chosen.kld_se)}"
        if size <= budget.limit:
            return "yes", f"{shown}: fits"
        limit = format_size(int(budget.limit))
        return "no", f"{shown}: more than {limit}, and nothing is smaller"
    loss, se, name = chosen.kld_mean, chosen.kld_se, "KLD"
    if budget.kind == "ratio":
        loss, se, name = chosen.ppl_ratio, chosen.ppl_ratio_se, "perplexity ratio"
    shown = f"{shown}, {name} {loss:.4f} ± {'?' if se is None else f'{se:.4f}'}"
    if se is None:
        return "cannot-tell", f"{shown}: its error is unknown"
    if loss + se <= budget.limit:
        return "yes", f"{shown}: at most {budget.limit:g}"
    if loss - se > budget.limit:
        return "no", f"{shown}: more than {budget.limit:g} on text that is held out"
    return "cannot-tell", f"{shown}: too little text to tell it from {budget.limit:g}"


def _sum_groups(search: Search, plan: Plan) -> float | None:
    """Sum what the choices cost alone; None where the plan has one that was not measured alone."""
    summed = 0.0
    for group in search.groups:
        chosen = group.choices[group.pick(plan)]
        if chosen.name != _name_choice(group, plan):
            return None
        summed += chosen.kld_mean
    return summed


def _name_choice(group: Group, plan: Plan) -> str:
    """Name the scheme that a plan gives to a group, also one that the search has dropped."""
    names = (choice_of(unit, plan) for unit in group.units)
    return next((name for name in names if name != IN_16_BITS), IN_16_BITS)


def _list_groups(search: Search, plan: Plan) -> Iterator[PlannedGroup]:
    for group in search.groups:
        units = group.units
        refused = dict(pair for unit in units for pair in unit.refused.items())
        if units[0].linears:
            refused = {**search.dropped, **refused}
        sites = {str(site) for unit in units for site in unit.sites}
        saved = count_bytes(units, {}) - count_bytes(units, plan)
        yield PlannedGroup(
            name=group.name,
            layers=tuple(sorted({layer for unit in units for layer in unit.layers})),
            linears=tuple(linear for unit in units for linear in unit.linears),
            choice=_name_choice(group, plan),
            rules={s: r for s, r in plan.items() if s in sites and r != str(AMAX)},
            saved_bytes=saved,
            why=_explain(group) or next(iter(refused.values()), ""),
            choices=group.choices[1:],
            refused=refused,
        )


def _explain(group: Group) -> str:
    """Say what each choice costs."""
    plain, *others = group.choices
    return "; ".join(
        f"{each.name}: KLD {format_mean_kld(each.kld_mean, each.kld_se)} for "
        f"{format_size(saved)}, {each.kld_mean / saved * 1e9:.2g} nats per GB"
        for each in others
        if (saved := plain.size_bytes - each.size_bytes) > 0
    )


def _list_points(
    choices: Choices, judged: Mapping[str, Plan], held_out: Measure
) -> Iterator[FrontierPoint]:
    """List the plans that were run, each once."""
    scores = dict(zip(judged, held_out.run(list(judged.values())), strict=True))
    klds = {name: found.klds for name, found in scores.items()}
    uniform = [{}, *list_uniform(choices.units).values()]
    seen: list[Plan] = []
    for name, plan in judged.items():
        if plan in seen:
            continue
        seen.append(plan)
        summary = summarize(scores[name], held_out.reference, held_out.lengths)
        is_chosen = name == CHOSEN
        yield FrontierPoint(
            name=name,
            size_bytes=choices.fixed_bytes + count_bytes(choices.units, plan),
            **{figure: getattr(summary, figure) for figure in _FIGURES},
            is_uniform=plan in uniform,
            is_chosen=is_chosen,
            against_chosen=None
            if is_chosen
            else compare_paired(name, CHOSEN, klds, held_out.lengths),
        )
