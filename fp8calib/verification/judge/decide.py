"""The decision of a report: what to serve or to do next, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.errors import cut_list, format_ranges
from fp8calib.verification.figures import format_mean_kld, format_ratio
from fp8calib.verification.judge.fits import LEAST_DB, get_loss, list_losing, list_unfit
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    PairedAnswer,
    PairedResult,
    Remedy,
    Verdict,
    VerifyReport,
    describe_pair,
    format_difference,
    tell_more,
)

_MOST_NAMED = 6
"""More layers are named as ranges."""
_MOST_DESCRIBED = 3
_FAR_BELOW = 4
"""An amax below the range of its scale by this factor shows that the scale is too large."""
_SMALLEST_SHARE = 1e-6
_LEAST_TOP1 = 0.75
"""Below this agreement of the most likely tokens, a candidate answers like another model."""
_CHANCE = 0.9
"""A perplexity above vocabulary ** 0.9 is that of a model which knows next to nothing."""
_SMALLEST_VOCABULARY = 256
"""Bytes alone are 256 tokens; a model with a smaller vocabulary is a toy that may know nothing."""


def conclude(report: VerifyReport) -> VerifyReport:
    """Add to a report what to serve or to do next, and whether KV scales are needed.

    Nothing is recommended if the unquantized model knows nothing. Nor is anything that fails its
    gate, that the text cannot judge, that is damaged, or that the engine cannot load.
    """
    others = [one for one in report.candidates if one.name != SCALE_ONE]
    scaled = [one for one in others if has_kv_only(one.name, report.layers)]
    weights = [one for one in others if one not in scaled]
    decided = [_decide_weights(report, weights)] if weights else []
    if (need := report.kv) is not None:
        decided.append(_decide_kv(report, need, scaled))
        need = need.model_copy(update={"why": decided[-1].headline})
    if report.broken:
        decided = [_decide(_BROKEN, report.broken)]
        need = need and need.model_copy(update={"answer": "cannot-tell", "why": _BROKEN})
    elif not decided:
        verdicts = ", ".join(f"{one.name}: {one.verdict}" for one in report.candidates)
        decided = [_decide(f"{verdicts or 'nothing was compared'}.")]
    unfit = (_describe_unfit(one.name, report) for one in others)
    details = [*_list_collapses(report), *(each.details for each in decided), *unfit]
    used = (each for each in decided if each.remedy is Remedy.USE)
    update = {
        "headline": " ".join(each.headline for each in decided),
        "details": "\n".join(filter(None, details)),
    }
    decision = next(used, decided[-1]).model_copy(update=update)
    return report.model_copy(update={"decision": decision, "kv": need})


def _decide(
    headline: str, *details: str, remedy: Remedy = Remedy.NONE, candidate: str = ""
) -> Decision:
    lines = "\n".join(details)
    return Decision(headline=headline, details=lines, remedy=remedy, candidate=candidate)


def has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    """Whether a candidate quantizes the KV cache, and no weights or inputs."""
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q", "p"}


_BROKEN = "Nothing can be told: the unquantized model predicts no better than chance."


def explain_broken(ppl: float, vocabulary: int) -> str:
    """Say why the unquantized model knows next to nothing; empty where it knows something."""
    if vocabulary < _SMALLEST_VOCABULARY or ppl <= vocabulary**_CHANCE:
        return ""
    return (
        f"Its perplexity is {ppl:,.0f}, its vocabulary {vocabulary:,}: is the model, its tokenizer "
        "or the text the right one?"
    )


def _list_collapses(report: VerifyReport) -> Iterator[str]:
    """Say what makes every other figure meaningless."""
    for one in report.candidates:
        if one.top1_agreement is not None and one.top1_agreement < _LEAST_TOP1:
            yield (
                f"{'Scale 1.0' if one.name == SCALE_ONE else one.name} predicts another token than "
                f"the unquantized model {1 - one.top1_agreement:.0%} of the time."
            )


# --- scales that do not fit -----------------------------------------------------------------------


def find_unfit(candidate: str, report: VerifyReport) -> set[str]:
    """Find the tensors of which the scales of a candidate lose what others would keep."""
    return {row.site for row in list_unfit(report.list_rows(candidate))}


def _describe_unfit(candidate: str, report: VerifyReport) -> str:
    described = [_describe_row(row) for row in list_unfit(report.list_rows(candidate))]
    rest = len(described) - _MOST_DESCRIBED
    more = f", and {rest} more" if rest > 0 else ""
    shown = "; ".join(described[:_MOST_DESCRIBED])
    return f"{candidate}: {shown}{more}." if described else ""


def _clips(row: LayerResult) -> bool:
    """Whether the amax, of the tensor or of a head, is above the range of its scale.

    Otherwise the scale is too large: with a fitted one, which clips nothing, less is lost.
    """
    if row.fit is None:
        return row.clipped > 0
    return bool(row.fit.clipped or row.fit.damage.clipped)


def _describe_row(row: LayerResult) -> str:
    """Describe what a scale that does not fit loses."""
    clips, fit, heads = _clips(row), row.fit, ""
    if fit is None:
        # Values become zero beside a large amax whatever the scale is, so this shows a scale that
        # is too large only if the amax is small.
        is_far_below = row.largest is not None and row.amax * _FAR_BELOW <= row.largest
        if not clips and not (row.flushed and is_far_below):
            return f"{_describe_place(row)} is distorted: its SQNR is {row.sqnr_db:.1f} dB"
        share = row.clipped if clips else row.flushed
    else:
        worst = fit.clipped or fit.damage.clipped_share if clips else fit.flushed
        share = row.clipped if clips else row.flushed
        if share < worst / 2:
            share, heads = worst, " of one head"
    verb = "clip" if clips else "become zero"
    lost = f"{_format_percent(share)} of the values{heads} {verb}"
    if not share:
        lost = f"this costs {get_loss(row):.1f} dB"
    where = _describe_place(row)
    if row.role == "q" and row.scale == 1.0:
        return f"{where}: there is no q_scale, so the engine uses 1.0; {lost}"
    return f"{where}: its scale is too {'small' if clips else 'large'}; {lost}"


def _describe_place(row: LayerResult) -> str:
    amax = row.amax if row.fit is None else row.fit.damage.amax
    shown = "" if row.scale is None else f", scale {row.scale:.3g}"
    return f"{row.site} (layer {row.layer}, amax {amax:.3g}{shown})"


def _format_percent(share: float) -> str:
    if share < _SMALLEST_SHARE:
        return f"less than {_SMALLEST_SHARE:.4%}"
    return f"{share:.1%}" if share >= 0.001 else f"{float(f'{share:.1g}') * 100:g}%"


# --- the KV cache ---------------------------------------------------------------------------------

_NEEDED = "This model needs KV scales"
_NOT_NEEDED = "This model does not need KV scales"
_LEAVE_LAYERS = "Leave the KV cache of some layers in 16 bits, or of all."
_OTHER_ENGINE = "Use another engine or format."


def _decide_kv(report: VerifyReport, need: KvNeed, scaled: Sequence[CandidateResult]) -> Decision:
    """Decide on the scales of the KV cache alone."""
    losing = list_losing(report.list_rows(SCALE_ONE))
    if need.answer == "no":
        return _decide_without(report, need, losing, scaled)
    where, paired = f"At scale 1.0 {describe_losing(losing)}", need.added_by_one
    changed = "" if paired is None else format_difference(paired)
    if need.answer == "cannot-tell":
        if paired is not None:
            where += f", which changes the KLD by {changed}{tell_more(paired)}"
        return _decide("This text cannot tell whether the model needs KV scales.", f"{where}.")
    if paired is None:
        one = _find(report, SCALE_ONE)
        where += f" (KLD {format_mean_kld(one.kld_mean, one.kld_se)})"
    elif paired.answer is PairedAnswer.WORSE:
        fp8 = format_mean_kld(need.fp8_kld, need.fp8_kld_se)
        where += f", which adds KLD {changed} to the {fp8} that FP8 costs with scales that fit"
    else:
        where += f": these are destroyed, though the KLD of this text does not show it ({changed})"
    where += "."
    unfit = {one.name: list_losing(report.list_rows(one.name)) for one in scaled}
    if fitting := [one for one in scaled if not unfit[one.name]]:
        return _choose_scaled(report, where, fitting)
    queries = [row for row in losing if row.role == "q"]
    repaired = [one for one in scaled if _needs_query_only(unfit[one.name])]
    if repaired and queries:
        best = min(repaired, key=get_kld).name
        layers = _join_layers(sorted({row.layer for row in queries}))
        headline = f"{_NEEDED}, and {best} has no scale for q of {layers}."
        return _decide(headline, where, remedy=Remedy.SCALE_QUERY, candidate=best)
    misfits = (f"In {name} {describe_losing(rows)}." for name, rows in unfit.items())
    of_query = " with --query-scale yes" if not scaled and len(queries) == len(losing) else ""
    others = ", and those of the candidates do not fit" if scaled else ""
    headline = f"{_NEEDED}{others}: calibrate{of_query}."
    return _decide(headline, where, *misfits, remedy=Remedy.CALIBRATE)


def _decide_without(
    report: VerifyReport,
    need: KvNeed,
    losing: Sequence[LayerResult],
    scaled: Sequence[CandidateResult],
) -> Decision:
    """Decide where scale 1.0 adds nothing to what FP8 costs."""
    one, kept = _find(report, SCALE_ONE), "scales that fit" if scaled else "any scale"
    why = "At scale 1.0 no K, V or q loses anything that another scale would keep."
    if need.added_by_one is not None and need.sites:
        kept, changed = "scales that fit", format_difference(need.added_by_one)
        why = f"At scale 1.0 {describe_losing(losing)}, but the KLD changes by {changed}."
    details = [
        f"FP8 costs KLD {format_mean_kld(need.fp8_kld, need.fp8_kld_se)} with {kept} "
        f"(perplexity ratio {format_ratio(one.ppl_ratio, one.ppl_ratio_se)} at scale 1.0).",
        why,
    ]
    for each in scaled:
        paired = _find_pair(report, each.name, SCALE_ONE)
        by_chance = " by another rounding alone" if paired.answer is PairedAnswer.BETTER else ""
        details.append(f"Against scale 1.0, {each.name} {describe_pair(paired)}{by_chance}.")
    is_unknown = one.verdict is Verdict.CANNOT_TELL
    is_warned = report.has_gate and one.verdict is Verdict.WARN
    passing = _list_passing(scaled, report)
    if is_warned:
        passing = [each for each in passing if each.verdict is not Verdict.WARN]
    if (_fails(one, report) or is_unknown or is_warned) and passing:
        best = min(passing, key=get_kld).name
        verdict = "cannot be judged by this text"
        if _fails(one, report):
            verdict = _spell_failure(one, report)
        elif is_warned:
            verdict = f"gets a warning of the {one.gate} gate"
        headline = f"Scale 1.0 {verdict}: use {best}."
        return _decide(headline, *details, remedy=Remedy.USE, candidate=best)
    if _fails(one, report):
        headline = f"{_NOT_NEEDED}, but an FP8 cache {_spell_failure(one, report)}."
        lines = (*details, _LEAVE_LAYERS)
        return _decide(headline, *lines, remedy=Remedy.FIND_LAYERS, candidate=SCALE_ONE)
    if is_unknown:
        return _decide(f"{_NOT_NEEDED}, but {_spell_doubt('an FP8 cache', report)}.", *details)
    if SCALE_ONE in report.unusable:
        return _decide(f"{_NOT_NEEDED}, but the engine cannot load it.", *details, _OTHER_ENGINE)
    return _decide(f"{_NOT_NEEDED}.", *details, remedy=Remedy.SERVE, candidate=SCALE_ONE)


def _needs_query_only(losing: Sequence[LayerResult]) -> bool:
    """Whether all that the scales of a candidate leave unfit is q at scale 1.0."""
    return all(row.role == "q" and row.scale == 1.0 for row in losing)


def _choose_scaled(
    report: VerifyReport, where: str, fitting: Sequence[CandidateResult]
) -> Decision:
    """Choose between candidates whose scales fit; `where` they are needed is the first detail."""
    loadable = [one for one in fitting if one.name not in report.unusable]
    if not loadable:
        named = ", ".join(one.name for one in fitting)
        headline = f"{_NEEDED}; {named} would fit, but the engine cannot use it."
        return _decide(headline, where, _OTHER_ENGINE)
    passing = _list_passing(fitting, report)
    best = min(passing or loadable, key=get_kld)
    name = best.name
    kld = format_mean_kld(best.kld_mean, best.kld_se)
    cost = f"{name} costs KLD {kld}"
    if _fails(best, report):
        headline = f"{_NEEDED}, and with {name} it still {_spell_failure(best, report)}."
        details = (where, f"{cost}. {_LEAVE_LAYERS}")
        return _decide(headline, *details, remedy=Remedy.FIND_LAYERS, candidate=name)
    if best.verdict is Verdict.CANNOT_TELL:
        headline = f"{_NEEDED}. {name} fits, but {_spell_doubt('it', report)}."
        return _decide(headline, where, f"{cost}.")
    removed = format_difference(_find_pair(report, name, SCALE_ONE))
    # `where` has the cost of the scales that fit best
    gain = [] if kld in where else [f"{cost}: {removed} against scale 1.0."]
    others = _compare_with_best(best, passing, report)
    warned = ", with a warning" * (report.has_gate and best.verdict is Verdict.WARN)
    headline = f"{_NEEDED}: use {name}{warned}."
    return _decide(headline, where, *gain, *others, remedy=Remedy.USE, candidate=name)


def describe_losing(rows: Sequence[LayerResult]) -> str:
    """Describe where scales do not fit: `k of layer 3 clips and v of layer 5 is partly zeroed`."""
    found: dict[tuple[str, bool], set[int]] = {}
    for row in rows:
        found.setdefault((row.role, _clips(row)), set()).add(row.layer)
    joined: dict[tuple[bool, tuple[int, ...]], list[str]] = {}
    for (role, clips), those in found.items():
        joined.setdefault((clips, tuple(sorted(those))), []).append(role)
    clauses = []
    for (clips, layers), roles in joined.items():
        one, several = ("clips", "clip") if clips else ("is partly zeroed", "are partly zeroed")
        verb = one if len(roles) == 1 else several
        clauses.append(f"{' and '.join(roles)} of {_join_layers(layers)} {verb}")
    return " and ".join(clauses)


def _join_layers(layers: Sequence[int]) -> str:
    """Name layers in a sentence, as ranges where they are many."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > _MOST_NAMED:
        return f"layers {format_ranges(layers)}"
    return f"layers {', '.join(map(str, layers[:-1]))} and {layers[-1]}"


# --- FP8 weights ----------------------------------------------------------------------------------


def _decide_weights(report: VerifyReport, found: Sequence[CandidateResult]) -> Decision:
    """Choose between candidates with FP8 weights: the smallest loss of those that pass."""
    failed = [one for one in found if one.name not in report.unusable and _fails(one, report)]
    unusable = [
        f"The engine cannot use {one.name}." for one in found if one.name in report.unusable
    ]
    only = found[0] if len(found) == 1 else None
    if passing := _list_passing(found, report):
        best = min(passing, key=get_kld)
        warned = ", with a warning" * (report.has_gate and best.verdict is Verdict.WARN)
        headline = _judge(only, report) if only else f"Use {best.name}{warned}: {_cost(best)}."
        others = _compare_with_best(best, passing, report)
        return _decide(headline, *unusable, *others, remedy=Remedy.USE, candidate=best.name)
    if failed:
        worst = min(failed, key=get_kld).name
        none = "No candidate passes." if report.has_gate else "Each candidate loses much."
        headline = _judge(only, report) if only else none
        rows = list_unfit(report.list_rows(worst))
        wrong = [r for r in rows if r.role in {"k", "v"} or _is_wrong_weight(r)]
        advice = "Leave the most sensitive layers in 16 bits, or use another scheme."
        remedy = Remedy.FIND_LAYERS
        if wrong:  # no scheme loses as much
            names = cut_list([each.site for each in wrong], 3)
            advice = (
                f"The scales of {names} are wrong, or the weights are "
                "another model's: quantize it again."
            )
            remedy = Remedy.CHECK
        return _decide(headline, advice, *unusable, remedy=remedy, candidate=worst)
    unknown = "This text cannot judge the candidates."
    return _decide(_judge(only, report) if only else unknown, *unusable)


def _is_wrong_weight(row: LayerResult) -> bool:
    return row.role == "weight" and (row.sqnr_db or 0.0) < LEAST_DB


_VERDICTS = {
    Verdict.PASS: "passes",
    Verdict.NO_DIFFERENCE: "loses nothing that this text shows",
    Verdict.WARN: "gets a warning",
    Verdict.FAIL: "fails",
    Verdict.CANNOT_TELL: "cannot be judged by this text",
}


def _judge(one: CandidateResult, report: VerifyReport) -> str:
    if report.has_gate or one.verdict in {Verdict.NO_DIFFERENCE, Verdict.CANNOT_TELL}:
        return f"{one.name} {_VERDICTS[one.verdict]}: {_cost(one)}."
    much = "loses much:" if one.verdict is Verdict.FAIL else "costs"
    return f"{one.name} {much} {_cost(one)}."


def _spell_failure(one: CandidateResult, report: VerifyReport) -> str:
    """Spell a failure: of the gate that was asked for, else in words."""
    return f"fails the {one.gate} gate" if report.has_gate else "loses much"


def _spell_doubt(what: str, report: VerifyReport) -> str:
    if report.has_gate:
        return f"whether {what} passes cannot be told"
    return f"this text cannot tell what {what} costs"


def _cost(one: CandidateResult) -> str:
    kld = format_mean_kld(one.kld_mean, one.kld_se)
    return f"KLD {kld}, perplexity ratio {format_ratio(one.ppl_ratio, one.ppl_ratio_se)}"


def _compare_with_best(
    best: CandidateResult, passing: Sequence[CandidateResult], report: VerifyReport
) -> list[str]:
    """Say how the others that pass compare with the one to use."""
    pairs = ((one.name, _find_pair(report, one.name, best.name)) for one in passing if one != best)
    return [f"Against {best.name}, {name} {describe_pair(pair)}." for name, pair in pairs]


def _find(report: VerifyReport, name: str) -> CandidateResult:
    return next(one for one in report.candidates if one.name == name)


def _find_pair(report: VerifyReport, candidate: str, base: str) -> PairedResult:
    pairs = report.comparisons
    return next(each for each in pairs if (each.candidate, each.base) == (candidate, base))


def _fails(one: CandidateResult, report: VerifyReport) -> bool:
    """Whether the gate fails: by a warning too if it is strict."""
    return one.verdict is Verdict.FAIL or (report.is_strict and one.verdict is Verdict.WARN)


def _list_passing(found: Sequence[CandidateResult], report: VerifyReport) -> list[CandidateResult]:
    """List the candidates that the engine loads and that pass."""
    return [
        one
        for one in found
        if one.name not in report.unusable
        and not _fails(one, report)
        and one.verdict is not Verdict.CANNOT_TELL
    ]


def get_kld(one: CandidateResult) -> float:
    """Give the mean divergence of an emulated candidate, which is always known."""
    assert one.kld_mean is not None  # noqa: S101
    return one.kld_mean
