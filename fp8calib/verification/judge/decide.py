"""The decision of a report: what to serve or to do next, and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fp8calib.errors import format_ranges
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.judge.damaged import list_unfit_rows
from fp8calib.verification.judge.kv_need import list_losing
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    PairedAnswer,
    PairedResult,
    Remedy,
    SiteFit,
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
    """Add to a report what it concludes: its decision, and whether KV scales are needed."""
    cached, need = decide_kv(report), report.kv
    if need is not None and cached is not None:
        need = need.model_copy(update={"why": cached.headline})
    if need is not None and report.broken:
        need = need.model_copy(update={"answer": "cannot-tell", "why": report.broken})
    return report.model_copy(update={"decision": decide(report, cached), "kv": need})


def decide(report: VerifyReport, cached: Decision | None) -> Decision:
    """Decide what to serve or to do next; `cached` is the decision about the KV cache.

    Nothing is recommended if the unquantized model knows nothing. Nor is anything that fails its
    gate, that the text cannot judge, that is damaged, or that the engine cannot load.
    """
    weights = [
        one
        for one in report.candidates
        if one.name != SCALE_ONE and not has_kv_only(one.name, report.layers)
    ]
    scaled = _list_scaled(report)
    if cached is not None:
        found = cached
        if weights and scaled:
            headline = f"{_decide_weights(report, weights).headline} {cached.headline}"
            found = cached.model_copy(update={"headline": headline})
    elif weights:
        found = _decide_weights(report, weights)
    else:
        verdicts = ", ".join(f"{one.name}: {one.verdict}" for one in report.candidates)
        found = Decision(headline=f"{verdicts}." if verdicts else "nothing was compared.")
    if report.broken:
        found = Decision(headline="")
    first = " ".join(filter(None, (report.broken, *_list_collapses(report))))
    headline = f"{first} {found.headline}".strip()
    details = " ".join(
        text
        for one in report.candidates
        if one.name != SCALE_ONE
        if (text := _describe_unfit(one.name, report))
    )
    return found.model_copy(update={"headline": headline, "details": details})


def _find_pair(report: VerifyReport, candidate: str, base: str) -> PairedResult:
    pairs = report.comparisons
    return next(each for each in pairs if (each.candidate, each.base) == (candidate, base))


def _list_scaled(report: VerifyReport) -> list[CandidateResult]:
    """List the candidates with KV scales, and nothing else."""
    return [
        one
        for one in report.candidates
        if one.name != SCALE_ONE and has_kv_only(one.name, report.layers)
    ]


def has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    """Whether a candidate quantizes the KV cache, and no weights or inputs."""
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q", "p"}


def explain_broken(ppl: float, vocabulary: int) -> str:
    """Say that nothing can be told, because the unquantized model knows next to nothing."""
    if vocabulary < _SMALLEST_VOCABULARY or ppl <= vocabulary**_CHANCE:
        return ""
    return (
        f"The unquantized model predicts no better than chance (perplexity {ppl:,.0f}, vocabulary "
        f"{vocabulary:,}), so nothing can be told: is the model, its tokenizer or the text the "
        "right one?"
    )


def _list_collapses(report: VerifyReport) -> Iterator[str]:
    """Say first what makes every other figure meaningless."""
    for one in report.candidates:
        if one.top1_agreement is not None and one.top1_agreement < _LEAST_TOP1:
            yield (
                f"{_name(one.name)} predicts another token than the unquantized model "
                f"{1 - one.top1_agreement:.0%} of the time."
            )


# --- scales that do not fit -----------------------------------------------------------------------


def _describe_unfit(candidate: str, report: VerifyReport) -> str:
    losing = list_losing(report.fits.get(candidate, ()))
    scales = {row.site: row.scale for row in report.layers if row.candidate == candidate}
    described = [_describe_fit(fit, scales.get(fit.site)) for fit in losing]
    described += map(_describe_row, list_unfit_rows(candidate, report.layers, report.fits))
    if not described:
        return ""
    rest = len(described) - _MOST_DESCRIBED
    more = f", and {rest} more" if rest > 0 else ""
    return f"{candidate}: {'; '.join(described[:_MOST_DESCRIBED])}{more}."


def _describe_fit(fit: SiteFit, scale: float | None) -> str:
    heads = "" if _is_of_all(fit) else " of one head"
    clips = _clips(fit)
    share = fit.clipped or fit.damage.clipped_share if clips else fit.flushed
    lost = f"{_format_percent(share)} of the values{heads} {'clip' if clips else 'become zero'}"
    if not share:
        lost = f"which costs {fit.loss_db:.1f} dB"
    return _describe_scale(fit.site, fit.layer, fit.role, fit.damage.amax, scale, lost, clips=clips)


def _clips(fit: SiteFit) -> bool:
    """Whether the amax, of the tensor or of a head, is above the range of its scale.

    Otherwise the scale is too large: with a fitted one, which clips nothing, less is lost.
    """
    return bool(fit.clipped or fit.damage.clipped)


def _is_of_all(fit: SiteFit) -> bool:
    """Whether the loss of the worst head is, within a factor of two, that of the tensor."""
    of_head = max(fit.clipped, fit.flushed)
    return max(fit.damage.clipped_share, fit.damage.flushed_share) >= of_head / 2


def _describe_row(row: LayerResult) -> str:
    # A value clips if and only if the amax is above the range. Values become zero beside a large
    # amax whatever the scale is, so this shows a scale that is too large only if the amax is small.
    clips = row.clipped > 0
    is_far_below = row.largest is not None and row.amax * _FAR_BELOW <= row.largest
    if not clips and not (row.flushed and is_far_below):
        scale = "" if row.scale is None else f", scale {row.scale:.3g}"
        where = f"{row.site} (layer {row.layer}, amax {row.amax:.3g}{scale})"
        return f"{where} is distorted: its SQNR is {row.sqnr_db:.1f} dB"
    share = row.clipped if clips else row.flushed
    lost = f"{_format_percent(share)} of the values {'clip' if clips else 'become zero'}"
    return _describe_scale(row.site, row.layer, row.role, row.amax, row.scale, lost, clips=clips)


def _describe_scale(
    site: str, layer: int, role: str, amax: float, scale: float | None, lost: str, *, clips: bool
) -> str:
    shown = "" if scale is None else f", scale {scale:.3g}"
    where = f"{site} (layer {layer}, amax {amax:.3g}{shown})"
    verb = "clips" if clips else "underflows"
    if role == "q" and scale == 1.0:
        return f"{where} {verb}: there is no q_scale, so the engine uses 1.0; {lost}"
    return f"{where} {verb}: its scale is too {'small' if clips else 'large'}, {lost}"


def _format_percent(share: float) -> str:
    if share < _SMALLEST_SHARE:
        return f"less than {_SMALLEST_SHARE:.4%}"
    return f"{share:.1%}" if share >= 0.001 else f"{float(f'{share:.1g}') * 100:g}%"


# --- the KV cache ---------------------------------------------------------------------------------


def decide_kv(report: VerifyReport) -> Decision | None:
    """Decide on the scales of the KV cache alone; None where no KV cache is compared."""
    need = report.kv
    if need is None:
        return None
    scaled = _list_scaled(report)
    unscaled = next(one for one in report.candidates if one.name == SCALE_ONE)
    if need.answer == "no":
        return _decide_without(report, need, unscaled, scaled)
    losing = list_losing(report.fits.get(SCALE_ONE, ()))
    where = describe_losing(losing)
    if need.answer == "cannot-tell":
        return _leave_open(need, where)
    needed = f"this model needs KV scales: {where} at scale 1.0{_describe_added(need, unscaled)}"
    queries = [fit for fit in losing if fit.role == "q"]
    fitting = [one for one in scaled if not list_losing(report.fits.get(one.name, ()))]
    if not fitting:
        return _decide_unfit(report, needed, queries, losing, scaled)
    return _choose_scaled(report, needed, fitting)


def _describe_added(need: KvNeed, unscaled: CandidateResult) -> str:
    fp8 = format_mean_kld(need.fp8_kld, need.fp8_kld_se)
    if need.added_by_one is None:
        return f" (KLD {format_mean_kld(unscaled.kld_mean, unscaled.kld_se)})"
    added = format_difference(need.added_by_one)
    if need.added_by_one.answer is PairedAnswer.WORSE:
        return f", which adds KLD {added} to the {fp8} that FP8 costs with scales that fit"
    return f", which destroys them, though the KLD of this text does not show it ({added})"


def _leave_open(need: KvNeed, where: str) -> Decision:
    paired = need.added_by_one
    text = f"whether this model needs KV scales cannot be told: {where} at scale 1.0"
    if paired is None:
        return Decision(headline=f"{text}.")
    more = tell_more(paired)
    return Decision(
        headline=f"{text}, but on this text that changes the KLD by {format_difference(paired)} "
        f"({'too few tokens to tell' if more else 'too few sequences'}{more})."
    )


def _decide_without(
    report: VerifyReport,
    need: KvNeed,
    unscaled: CandidateResult,
    scaled: Sequence[CandidateResult],
) -> Decision:
    """Decide where scale 1.0 adds nothing to what FP8 costs."""
    cost = f"FP8 itself costs KLD {format_mean_kld(need.fp8_kld, need.fp8_kld_se)}"
    why = "no K, V or q loses anything at scale 1.0 that another scale would keep"
    if need.sites:
        assert need.added_by_one is not None  # noqa: S101 -- only the divergence said no
        losing = describe_losing(list_losing(report.fits.get(SCALE_ONE, ())))
        why = (
            f"{losing} at scale 1.0, but the KLD changes by {format_difference(need.added_by_one)}"
        )
    text = f"this model does not need KV scales: {why}. {cost} ({unscaled.verdict_why})"
    if others := [_compare_with_one(report, one) for one in scaled]:
        text = f"{text}; against scale 1.0, {'; '.join(others)}"
    if _fails(unscaled, report):
        text = f"{text}. That fails the {unscaled.gate} gate: leave the KV cache of some layers "
        return Decision(
            headline=f"{text}unquantized, or of all.",
            remedy=Remedy.FIND_LAYERS,
            candidate=SCALE_ONE,
        )
    if unscaled.verdict is Verdict.CANNOT_TELL:
        return Decision(headline=f"on this text {text}.")
    if SCALE_ONE in report.unusable:
        text = f"{text}. But the engine cannot load the model"
        return Decision(headline=f"{text}: use another engine or format.")
    return Decision(headline=f"{text}.", remedy=Remedy.SERVE, candidate=SCALE_ONE)


def _compare_with_one(report: VerifyReport, one: CandidateResult) -> str:
    paired = _find_pair(report, one.name, SCALE_ONE)
    by_chance = " by another rounding alone" if paired.answer is PairedAnswer.BETTER else ""
    return f"{one.name} {describe_pair(paired)}{by_chance}"


def _decide_unfit(
    report: VerifyReport,
    needed: str,
    queries: Sequence[SiteFit],
    losing: Sequence[SiteFit],
    scaled: Sequence[CandidateResult],
) -> Decision:
    """Decide where scales are needed, and no candidate has those that fit."""
    repaired = [one for one in scaled if _needs_query_only(one.name, report)]
    only_queries = len(queries) == len(losing)
    if repaired and queries:
        best = min(repaired, key=get_kld)
        layers = _join_layers(sorted({fit.layer for fit in queries}))
        text = f"{needed}; {best.name} has no scale for q of {layers}"
        return Decision(headline=f"{text}.", remedy=Remedy.SCALE_QUERY, candidate=best.name)
    if scaled:
        worst = "; ".join(
            f"{one.name} does not fit either: "
            f"{describe_losing(list_losing(report.fits.get(one.name, ())))}"
            for one in scaled
        )
        return Decision(headline=f"{needed}. {worst}: calibrate.", remedy=Remedy.CALIBRATE)
    of_query = " with --query-scale yes" if only_queries else ""
    return Decision(headline=f"{needed}: calibrate{of_query}.", remedy=Remedy.CALIBRATE)


def _needs_query_only(name: str, report: VerifyReport) -> bool:
    """Whether all that the scales of a candidate leave unfit is q at scale 1.0."""
    losing = list_losing(report.fits.get(name, ()))
    scales = {row.site: row.scale for row in report.layers if row.candidate == name}
    return all(fit.role == "q" and scales.get(fit.site) == 1.0 for fit in losing)


def _choose_scaled(
    report: VerifyReport,
    needed: str,
    fitting: Sequence[CandidateResult],
) -> Decision:
    loadable = [one for one in fitting if one.name not in report.unusable]
    if not loadable:
        named = ", ".join(one.name for one in fitting)
        text = f"{needed}. {named} would fit, but the engine cannot use it"
        return Decision(headline=f"{text}: use another engine or format.")
    passing = [one for one in loadable if not _is_unusable(one, report)]
    best = min(passing or loadable, key=get_kld)
    klds = f"KLD {format_mean_kld(best.kld_mean, best.kld_se)}, {best.verdict_why}"
    if _fails(best, report):
        text = f"{needed}. With {best.name} it still fails ({klds}): leave the KV cache of some "
        return Decision(
            headline=f"{text}layers unquantized, or of all.",
            remedy=Remedy.FIND_LAYERS,
            candidate=best.name,
        )
    if best.verdict is Verdict.CANNOT_TELL:
        text = f"{needed}. {best.name} fits, but whether it passes cannot be told ({klds})"
        return Decision(headline=f"{text}.")
    removed = format_difference(_find_pair(report, best.name, SCALE_ONE))
    text = f"{needed}; use {best.name}: KLD {removed} against scale 1.0 ({klds})"
    text = f"{text}{_compare_with_best(best, passing, report)}"
    return Decision(headline=f"{text}.", remedy=Remedy.USE, candidate=best.name)


def describe_losing(fits: Sequence[SiteFit]) -> str:
    """Describe where scales do not fit: `k of layer 3 clips and v of layers 5 and 7 underflows`."""
    found: dict[tuple[str, str], set[int]] = {}
    for fit in fits:
        verb = "clips" if _clips(fit) else "underflows"
        found.setdefault((fit.role, verb), set()).add(fit.layer)
    joined: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (role, verb), layers in found.items():
        joined.setdefault((verb, tuple(sorted(layers))), []).append(role)
    return " and ".join(
        f"{' and '.join(roles)} of {_join_layers(layers)} {verb if len(roles) == 1 else verb[:-1]}"
        for (verb, layers), roles in joined.items()
    )


def _join_layers(layers: Sequence[int]) -> str:
    """Name layers in a sentence, as ranges where they are many."""
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > _MOST_NAMED:
        return f"layers {format_ranges(layers)}"
    shown = ", ".join(map(str, layers[:-1]))
    return f"layers {shown} and {layers[-1]}"


# --- FP8 weights ----------------------------------------------------------------------------------


def _decide_weights(report: VerifyReport, found: Sequence[CandidateResult]) -> Decision:
    """Choose between candidates with FP8 weights: the smallest loss of those that pass."""
    listed = "; ".join(
        f"{one.name}: {one.verdict} (KLD {format_mean_kld(one.kld_mean, one.kld_se)}, "
        f"{one.verdict_why}{'; the engine cannot use it' if one.name in report.unusable else ''})"
        for one in found
    )
    loadable = [one for one in found if one.name not in report.unusable]
    if passing := [one for one in loadable if not _is_unusable(one, report)]:
        best = min(passing, key=get_kld)
        choice = f"; use {best.name}{_compare_with_best(best, passing, report)}"
        choice = choice if len(found) > 1 else ""
        return Decision(headline=f"{listed}{choice}.", remedy=Remedy.USE, candidate=best.name)
    if failed := [one for one in loadable if _fails(one, report)]:
        return Decision(
            headline=f"{listed}; leave the most sensitive layers unquantized, or use another "
            "scheme.",
            remedy=Remedy.FIND_LAYERS,
            candidate=min(failed, key=get_kld).name,
        )
    return Decision(headline=f"{listed}.")


def _compare_with_best(
    best: CandidateResult, passing: Sequence[CandidateResult], report: VerifyReport
) -> str:
    """Say how the others that pass compare with the one to use; empty without others."""
    others = [
        f"{one.name} {describe_pair(_find_pair(report, one.name, best.name))}"
        for one in passing
        if one is not best
    ]
    return f"; against it, {'; '.join(others)}" if others else ""


def _fails(one: CandidateResult, report: VerifyReport) -> bool:
    """Whether the gate fails: by a warning too if it is strict."""
    return one.verdict is Verdict.FAIL or (report.is_strict and one.verdict is Verdict.WARN)


def _is_unusable(one: CandidateResult, report: VerifyReport) -> bool:
    """Whether a candidate fails, or cannot be judged."""
    return _fails(one, report) or one.verdict is Verdict.CANNOT_TELL


def _name(candidate: str) -> str:
    return "Scale 1.0" if candidate == SCALE_ONE else candidate


def get_kld(one: CandidateResult) -> float:
    """Give the mean divergence of an emulated candidate, which is always known."""
    assert one.kld_mean is not None  # noqa: S101
    return one.kld_mean
