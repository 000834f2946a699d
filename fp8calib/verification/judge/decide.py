"""The decision of a report: what to serve or to do next, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from fp8calib.errors import cut_list, name_ranges
from fp8calib.verification.judge.fits import list_losing, list_unfit
from fp8calib.verification.report import (
    LEAST_DB,
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    Remedy,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.tables import (
    describe_pair,
    format_difference,
    format_mean_kld,
    format_ratio,
    tell_more,
)

_LEAST_TOP1 = 0.75
"""Below this agreement of the most likely tokens, a candidate answers like another model."""
_CHANCE = 0.9
"""A perplexity above vocabulary ** 0.9 is that of a model which knows next to nothing."""
_SMALLEST_VOCABULARY = 256
"""Bytes alone are 256 tokens; a model with a smaller vocabulary is a toy that may know nothing."""
_ALIKE = 1.05
"""Sizes within this factor are alike: then the KLD decides."""
_VERDICTS = {
    Verdict.PASS: "passes",
    Verdict.NO_DIFFERENCE: "loses nothing that this text shows",
    Verdict.WARN: "gets a warning",
    Verdict.FAIL: "fails",
    Verdict.CANNOT_TELL: "cannot be judged by this text",
}
_BROKEN = "Nothing can be told: the unquantized model predicts no better than chance."


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
    collapses = (  # they make every other figure meaningless
        f"{'Scale 1.0' if one.name == SCALE_ONE else one.name} predicts another token than the "
        f"unquantized model {1 - one.top1_agreement:.0%} of the time."
        for one in report.candidates
        if one.top1_agreement is not None and one.top1_agreement < _LEAST_TOP1
    )
    unfit = ((one.name, list_unfit(report.list_rows(one.name))) for one in others)
    misfits = (f"{name}: {_describe_unfit(rows)}." for name, rows in unfit if rows)
    lines = (*collapses, *filter(None, (each.details for each in decided)), *misfits)
    update = {"headline": " ".join(e.headline for e in decided), "details": "\n".join(lines)}
    used = (each for each in decided if each.remedy == "use")
    decision = next(used, decided[-1]).model_copy(update=update)
    return report.model_copy(update={"decision": decision, "kv": need})


def _decide(
    headline: str,
    *details: str,
    remedy: Remedy = "none",
    candidate: str = "",
    failed: CandidateResult | None = None,
) -> Decision:
    """Make a decision; if the best candidate has `failed`, layers in 16 bits may help."""
    if failed is not None and failed.verdict is not Verdict.CANNOT_TELL:
        details, remedy, candidate = (*details, _LEAVE_LAYERS), "find-layers", failed.name
    lines = "\n".join(details)
    return Decision(headline=headline, details=lines, remedy=remedy, candidate=candidate)


def has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    """Whether a candidate quantizes the KV cache, and no weights or inputs."""
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q", "p"}


def explain_broken(ppl: float, vocabulary: int) -> str:
    """Say why the unquantized model knows next to nothing; empty if it knows something."""
    if vocabulary < _SMALLEST_VOCABULARY or ppl <= vocabulary**_CHANCE:
        return ""
    return (
        f"Its perplexity is {ppl:,.0f}, its vocabulary {vocabulary:,}: is the model, its tokenizer "
        "or the text the right one?"
    )


def _describe_unfit(rows: Sequence[LayerResult]) -> str:
    """Describe where scales do not fit: `k of layer 3 clips and v of layer 5 is partly zeroed`."""
    layers: dict[tuple[str, str], set[int]] = {}
    for row in rows:
        lost = "is distorted" if row.loss_db is None else "is partly zeroed"
        # else the scale is too large: with a fitted one, which clips nothing, less is lost
        lost = "clips" if (row.clipped if row.loss_db is None else row.clips) else lost
        what = row.role if len(row.role) == 1 else ".".join(row.site.split(".")[-2:])
        layers.setdefault((lost, what), set()).add(row.layer)
    return " and ".join(
        f"{what} of {name_ranges(indices)} {lost}" for (lost, what), indices in layers.items()
    )


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
    paired = need.added_by_one
    assert paired is not None  # noqa: S101 -- as something loses
    where, changed = f"At scale 1.0 {_describe_unfit(losing)}", format_difference(paired)
    if need.answer == "cannot-tell":
        where += f", which changes the KLD by {changed}{tell_more(paired)}."
        return _decide("This text cannot tell whether the model needs KV scales.", where)
    if paired.answer == "worse":
        fp8 = format_mean_kld(need.fp8_kld, need.fp8_kld_se)
        where += f", which adds KLD {changed} to the {fp8} that FP8 costs with scales that fit."
    else:
        where += f": these are destroyed, though the KLD of this text does not show it ({changed})."
    unfit = {one.name: list_losing(report.list_rows(one.name)) for one in scaled}
    if fitting := [one for one in scaled if not unfit[one.name]]:
        return _choose_scaled(report, need, where, fitting)
    queries = [row for row in losing if row.role == "q"]
    repaired = [
        one
        for one in scaled  # all that they leave unfit is q at scale 1.0
        if all(row.role == "q" and row.scale == 1.0 for row in unfit[one.name])
    ]
    if repaired and queries:
        best = min(repaired, key=get_kld).name
        layers = name_ranges({row.layer for row in queries})
        headline = f"{_NEEDED}, and {best} has no scale for q of {layers}."
        return _decide(headline, where, remedy="scale-query", candidate=best)
    of_query = " with --query-scale yes" if not scaled and len(queries) == len(losing) else ""
    others = ", and those of the candidates do not fit" if scaled else ""
    headline = f"{_NEEDED}{others}: calibrate{of_query}."
    return _decide(headline, where, remedy="calibrate")


def _decide_without(
    report: VerifyReport,
    need: KvNeed,
    losing: Sequence[LayerResult],
    scaled: Sequence[CandidateResult],
) -> Decision:
    """Decide where scale 1.0 adds nothing to what FP8 costs."""
    one = next(one for one in report.candidates if one.name == SCALE_ONE)
    kld = format_mean_kld(need.fp8_kld, need.fp8_kld_se)
    ratio = f"perplexity ratio {format_ratio(one.ppl_ratio, one.ppl_ratio_se)}"
    details = [
        f"FP8 costs KLD {kld} at scale 1.0 ({ratio}).",
        "There no K, V or q loses anything that another scale would keep.",
    ]
    if need.added_by_one is not None and need.sites:
        why = f"{_describe_unfit(losing)}, but the KLD changes by"
        details = [
            f"FP8 costs KLD {kld} with scales that fit ({ratio} at scale 1.0).",
            f"At scale 1.0 {why} {format_difference(need.added_by_one)}.",
        ]
    for paired in need.removed:
        by_chance = " by another rounding alone" if paired.answer == "better" else ""
        details.append(f"Against scale 1.0, {paired.candidate} {describe_pair(paired)}{by_chance}.")
    fault, passing = _find_fault(one, report), _list_passing(scaled, report)
    warning = fault
    if not fault and report.has_gate and one.verdict is Verdict.WARN:
        warning = f"gets a warning of the {one.gate} gate"
        passing = [each for each in passing if each.verdict is not Verdict.WARN]
    if warning and passing:
        best = min(passing, key=get_kld).name
        headline = f"Scale 1.0 {warning}: use {best}."
        return _decide(headline, *details, remedy="use", candidate=best)
    if fault:
        return _decide(f"{_NOT_NEEDED}, but an FP8 cache {fault}.", *details, failed=one)
    if SCALE_ONE in report.unusable:
        return _decide(f"{_NOT_NEEDED}, but the engine cannot load it.", *details, _OTHER_ENGINE)
    return _decide(f"{_NOT_NEEDED}.", *details, remedy="serve", candidate=SCALE_ONE)


def _choose_scaled(
    report: VerifyReport, need: KvNeed, where: str, fitting: Sequence[CandidateResult]
) -> Decision:
    """Choose between candidates whose scales fit; `where` they are needed is the first detail."""
    loadable = [one for one in fitting if one.name not in report.unusable]
    if not loadable:
        named = ", ".join(one.name for one in fitting)
        headline = f"{_NEEDED}; {named} would fit, but the engine cannot use it."
        return _decide(headline, where, _OTHER_ENGINE)
    passing = _list_passing(fitting, report)
    best = min(passing or loadable, key=get_kld)
    name, kld = best.name, format_mean_kld(best.kld_mean, best.kld_se)
    cost = f"{name} costs KLD {kld}"
    if fault := _find_fault(best, report):
        return _decide(f"{_NEEDED}. {name} fits, but {fault}.", where, f"{cost}.", failed=best)
    removed = next(format_difference(pair) for pair in need.removed if pair.candidate == name)
    # `where` has the cost of the scales that fit best
    gain = [] if kld in where else [f"{cost}: {removed} against scale 1.0."]
    others, warned = _compare_with_best(best, passing, report)
    headline = f"{_NEEDED}: use {name}{warned}."
    return _decide(headline, where, *gain, *others, remedy="use", candidate=name)


# --- FP8 weights ----------------------------------------------------------------------------------


def _decide_weights(report: VerifyReport, found: Sequence[CandidateResult]) -> Decision:
    """Choose between candidates with FP8 weights: the smallest loss of those that pass."""
    left = [one for one in found if one.name not in report.unusable]
    unusable = [f"The engine cannot use {one.name}." for one in found if one not in left]
    known = (one for one in left if one.verdict is not Verdict.CANNOT_TELL)
    failed = [one for one in known if _find_fault(one, report)]
    only = _judge(found[0], report) if len(found) == 1 else ""
    if passing := _list_passing(found, report):
        best = min(passing, key=get_kld)
        others, warned = _compare_with_best(best, passing, report)
        headline = only or f"Use {best.name}{warned}: {_cost(best)}."
        return _decide(headline, *unusable, *others, remedy="use", candidate=best.name)
    if not failed:
        return _decide(only or "This text cannot judge the candidates.", *unusable)
    worst = min(failed, key=get_kld).name
    none = "No candidate passes." if report.has_gate else "Each candidate loses much."
    advice = "Leave the most sensitive layers in 16 bits, or use another scheme."
    remedy: Remedy = "find-layers"
    wrong = [  # no scheme loses as much
        row.site
        for row in list_unfit(report.list_rows(worst))
        if row.role in {"k", "v"} or (row.role == "weight" and (row.sqnr_db or 0.0) < LEAST_DB)
    ]
    if wrong:
        advice = f"The scales of {cut_list(wrong, 3)} are wrong, or the weights are "
        advice += "another model's: quantize it again."
        remedy = "check"
    return _decide(only or none, advice, *unusable, remedy=remedy, candidate=worst)


def _judge(one: CandidateResult, report: VerifyReport) -> str:
    if report.has_gate or one.verdict in {Verdict.NO_DIFFERENCE, Verdict.CANNOT_TELL}:
        return f"{one.name} {_VERDICTS[one.verdict]}: {_cost(one)}."
    much = "loses much:" if one.verdict is Verdict.FAIL else "costs"
    return f"{one.name} {much} {_cost(one)}."


def _cost(one: CandidateResult) -> str:
    kld = format_mean_kld(one.kld_mean, one.kld_se)
    return f"KLD {kld}, perplexity ratio {format_ratio(one.ppl_ratio, one.ppl_ratio_se)}"


# --- both -----------------------------------------------------------------------------------------


def _find_fault(one: CandidateResult, report: VerifyReport) -> str:
    """Say why a candidate does not pass; empty if it does. A warning fails a strict gate."""
    if one.verdict is Verdict.FAIL or (report.is_strict and one.verdict is Verdict.WARN):
        return f"fails the {one.gate} gate" if report.has_gate else "loses much"
    return _VERDICTS[one.verdict] if one.verdict is Verdict.CANNOT_TELL else ""


def _compare_with_best(
    best: CandidateResult, passing: Sequence[CandidateResult], report: VerifyReport
) -> tuple[list[str], str]:
    """Say how the others that pass compare with the one to use, and that it gets a warning."""
    names = {one.name for one in passing}
    others = [
        f"Against {best.name}, {pair.candidate} {describe_pair(pair)}."
        for pair in report.comparisons
        if pair.base == best.name and pair.candidate in names
    ]
    return others, ", with a warning" * (report.has_gate and best.verdict is Verdict.WARN)


def _list_passing(found: Sequence[CandidateResult], report: VerifyReport) -> list[CandidateResult]:
    """List the candidates that the engine loads and that pass."""
    usable = (one for one in found if one.name not in report.unusable)
    return [one for one in usable if not _find_fault(one, report)]


def get_kld(one: CandidateResult) -> float:
    """Give the mean divergence of an emulated candidate, which is always known."""
    assert one.kld_mean is not None  # noqa: S101
    return one.kld_mean


# --- the smallest ---------------------------------------------------------------------------------


def choose_smallest(report: VerifyReport, sizes: Mapping[str, int]) -> Decision:
    """Decide on the smallest candidate that passes without a warning.

    Scales of a KV cache that does not need them are no choice: they are another rounding alone.
    `sizes` has the bytes of those that can be chosen, by the last part of their path.
    """
    found = {Path(each.name).name: each for each in report.candidates}
    good = {Verdict.PASS, Verdict.NO_DIFFERENCE}
    usable = {n: one for n, one in found.items() if one.name not in report.unusable}
    passing = {n: one for n, one in usable.items() if n in sizes and one.verdict in good}
    if report.kv is not None and report.kv.answer == "no" and SCALE_ONE in passing:
        scaled = {n for n, one in passing.items() if has_kv_only(one.name, report.layers)}
        passing = {n: one for n, one in passing.items() if n not in scaled - {SCALE_ONE}}
    details = report.decision.details
    if not passing:
        name, nearest = min(found.items(), key=lambda item: get_kld(item[1]))
        verdict = f"{nearest.verdict}: {nearest.verdict_why}"
        other = "`quantize --scheme w8a16` or `gptq` may lose less."
        return _decide(
            f"No choice passes the gate; the nearest, {name}, gets {verdict}. {other}", details
        )
    least = min(sizes[name] for name in passing)
    best = min((passing[n] for n in passing if sizes[n] <= least * _ALIKE), key=get_kld)
    is_model = best.name == SCALE_ONE
    headline = f"Serve {'the model itself' if is_model else best.name}: KLD "
    headline += f"{format_mean_kld(best.kld_mean, best.kld_se)}."
    remedy: Remedy = "serve" if is_model else "use"
    return _decide(headline, details, remedy=remedy, candidate=best.name)
