"""The report in a sentence: which scale is wrong, or whether scales are needed at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from fp8calib.verification.judge.damaged import CLIPPED, find_broken
from fp8calib.verification.report import SCALE_ONE, CandidateResult, LayerResult, Verdict, spell_kld

LARGEST_SE = 0.01
"""The margin of the `kv` gate: with a larger error its verdict says little."""
NOTABLE_KLD = 1.25
"""Scales whose mean KL divergence is not lower by this factor change nothing worth the effort."""
_SURE = 2.0
"""Divergences closer than so many standard errors of their difference are called the same."""
Errors = Mapping[str, float | None]
"""Standard error of a candidate's mean divergence less that of scale 1.0; None: nobody knows."""


def advise(
    candidates: Sequence[CandidateResult], layers: Sequence[LayerResult], errors: Errors
) -> str:
    """Say what is broken first, then whether the KV cache needs scales."""
    sentences = [
        text
        for candidate in candidates
        if candidate.name != SCALE_ONE and (text := _broken(candidate, layers))
    ]
    return " ".join([*sentences, _about_scales(candidates, layers, errors)])


def _broken(candidate: CandidateResult, layers: Sequence[LayerResult]) -> str:
    rows = find_broken(candidate.name, layers)
    if not rows:
        return ""
    described = [_describe(row) for row in rows[:3]]
    more = f", and {len(rows) - 3} more" if rows[3:] else ""
    return f"{candidate.name}: {'; '.join(described)}{more}."


def _describe(row: LayerResult) -> str:
    scale = "" if row.scale is None else f", scale {row.scale:.3g}"
    where = f"{row.site} (layer {row.layer}, amax {row.amax:.3g}{scale})"
    if row.clipped > CLIPPED or row.clipped > row.flushed:
        return f"{where} clips: its scale is too small, {_percent(row.clipped)} of the values clip"
    if not row.flushed:
        return f"{where} is not what it was: an SQNR of {row.sqnr_db:.1f} dB"
    return (
        f"{where} underflows: its scale is too large, {_percent(row.flushed)} of the values "
        "become zero"
    )


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2g}"


def _about_scales(
    candidates: Sequence[CandidateResult], layers: Sequence[LayerResult], errors: Errors
) -> str:
    by_name = {candidate.name: candidate for candidate in candidates}
    unscaled = by_name.get(SCALE_ONE)
    if unscaled is None:
        return _verdicts(candidates)
    scaled = [
        candidate
        for candidate in candidates
        if candidate.name != SCALE_ONE and _has_kv_only(candidate.name, layers)
    ]
    hurt = find_broken(SCALE_ONE, layers)
    others = [candidate for candidate in candidates if candidate.name != SCALE_ONE]
    if others and not scaled:
        return _verdicts(others)
    if not scaled:
        return _alone(unscaled, hurt)
    best = min(scaled, key=lambda candidate: candidate.kld_mean)
    error = errors.get(best.name)
    if hurt and find_broken(best.name, layers) and not _is_less(best, unscaled, error):
        return (
            f"{_list_hurt(hurt)} at scale 1.0, and {best.name} does not mend it "
            f"({_spell_klds(unscaled, best)}): calibrate, or leave the KV cache unquantized."
        )
    return _compare(unscaled, best, hurt, error)


def _verdicts(candidates: Sequence[CandidateResult]) -> str:
    said = [f"{candidate.name}: {candidate.verdict}" for candidate in candidates]
    return f"{', '.join(said)}." if said else "nothing was compared."


def _has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q"}


def _is_fine(candidate: CandidateResult) -> bool:
    return candidate.verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}


def _alone(unscaled: CandidateResult, hurt: Sequence[LayerResult]) -> str:
    cost = f"KLD {spell_kld(unscaled.kld_mean)}, {unscaled.verdict_why}"
    if hurt:
        return f"{_list_hurt(hurt)} at scale 1.0 ({cost}); calibrate."
    if _is_fine(unscaled):
        return f"this model does not need KV scales: at scale 1.0 {cost}{_doubt(unscaled)}."
    if unscaled.ppl_ratio_se is None:
        return f"whether this model needs KV scales cannot be said: at scale 1.0 {cost}."
    return f"scale 1.0 costs accuracy ({cost}), though no layer stands out; calibrate."


def _compare(
    unscaled: CandidateResult,
    best: CandidateResult,
    hurt: Sequence[LayerResult],
    error: float | None,
) -> str:
    klds = _spell_klds(unscaled, best)
    if _is_less(unscaled, best, error):
        return f"scale 1.0 is better than {best.name} ({klds}): do not use these scales."
    if hurt:
        return f"{_list_hurt(hurt)} at scale 1.0; use {best.name} ({klds})."
    if _is_less(best, unscaled, error):
        return f"scales help: use {best.name} ({klds})."
    return _weigh(unscaled, best, klds)


def _spell_klds(unscaled: CandidateResult, best: CandidateResult) -> str:
    return f"KLD {spell_kld(unscaled.kld_mean)} at scale 1.0 against {spell_kld(best.kld_mean)}"


def _weigh(unscaled: CandidateResult, best: CandidateResult, klds: str) -> str:
    """Say which will do where the divergences are alike."""
    if unscaled.ppl_ratio_se is None:
        return f"what scales change cannot be said ({klds} with {best.name}): give more text."
    if _is_fine(best) and not _is_fine(unscaled):
        return f"use {best.name}, which passes: {unscaled.verdict_why} at scale 1.0 ({klds})."
    if _is_fine(unscaled):
        return f"this model does not need KV scales: {klds} with {best.name}{_doubt(unscaled)}."
    return (
        f"scales change nothing here ({klds} with {best.name}): what it costs comes from FP8 "
        f"itself ({unscaled.verdict_why})."
    )


def _is_less(one: CandidateResult, other: CandidateResult, error: float | None) -> bool:
    """Whether the divergence of `one` is less than the other's by more than chance."""
    difference = other.kld_mean - one.kld_mean
    is_sure = error is not None and difference > _SURE * error
    return is_sure and other.kld_mean > one.kld_mean * NOTABLE_KLD


def _doubt(candidate: CandidateResult) -> str:
    """Say when the text is too short for what a gate asks."""
    if candidate.ppl_ratio_se is None:
        return " (the ratio's error is unknown: give more text)"
    if candidate.ppl_ratio_se <= LARGEST_SE:
        return ""
    return f" (the ratio's error of {candidate.ppl_ratio_se:.3f} is large: give more text)"


def _list_hurt(rows: Sequence[LayerResult]) -> str:
    clipping = _layers(row for row in rows if row.clipped > CLIPPED)
    vanishing = _layers(row for row in rows if row.clipped <= CLIPPED)
    parts = []
    if clipping:
        parts.append(f"{_name_layers(clipping)} {'clips' if len(clipping) == 1 else 'clip'}")
    if vanishing:
        verb = "underflows" if len(vanishing) == 1 else "underflow"
        parts.append(f"{_name_layers(vanishing)} {verb}")
    return " and ".join(parts)


def _layers(rows: Iterable[LayerResult]) -> list[int]:
    return sorted({row.layer for row in rows})


def _name_layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(map(str, layers[:-1]))
    return f"layers {shown} and {layers[-1]}"
