"""The report's conclusion: which scales are wrong, or whether scales are needed at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.verification.judge.damaged import CLIPPED, list_unfit_scales
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    LayerResult,
    Verdict,
    format_kld,
)

LARGEST_SE = 0.01
"""The margin of the `kv` gate; with a larger error its verdict means little."""
NOTABLE_KLD = 1.25
"""Scales that do not lower the mean KL divergence by this factor are not worth the effort."""
_SURE = 2.0
"""Divergences closer than this many standard errors of their difference count as equal."""
Errors = Mapping[str, float | None]
"""Standard error of a candidate's mean divergence minus that of scale 1.0; None: unknown."""


def advise(
    candidates: Sequence[CandidateResult], layers: Sequence[LayerResult], errors: Errors
) -> str:
    """Name the scales that do not fit, then say whether the KV cache needs scales."""
    sentences = [
        text
        for candidate in candidates
        if candidate.name != SCALE_ONE and (text := _describe_unfit_scales(candidate, layers))
    ]
    return " ".join([*sentences, _compare_with_one(candidates, layers, errors)])


def _describe_unfit_scales(candidate: CandidateResult, layers: Sequence[LayerResult]) -> str:
    rows = list_unfit_scales(candidate.name, layers)
    if not rows:
        return ""
    described = [_describe_row(row) for row in rows[:3]]
    more = f", and {len(rows) - 3} more" if rows[3:] else ""
    return f"{candidate.name}: {'; '.join(described)}{more}."


def _describe_row(row: LayerResult) -> str:
    scale = "" if row.scale is None else f", scale {row.scale:.3g}"
    where = f"{row.site} (layer {row.layer}, amax {row.amax:.3g}{scale})"
    if row.clipped > CLIPPED or row.clipped > row.flushed:
        share = _format_percent(row.clipped)
        return f"{where} clips: its scale is too small, {share} of the values clip"
    if not row.flushed:
        return f"{where} is distorted: its SQNR is {row.sqnr_db:.1f} dB"
    return (
        f"{where} underflows: its scale is too large, {_format_percent(row.flushed)} of the values "
        "become zero"
    )


def _format_percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2g}"


def _compare_with_one(
    candidates: Sequence[CandidateResult], layers: Sequence[LayerResult], errors: Errors
) -> str:
    by_name = {candidate.name: candidate for candidate in candidates}
    unscaled = by_name.get(SCALE_ONE)
    if unscaled is None:
        return _list_verdicts(candidates)
    others = [candidate for candidate in candidates if candidate.name != SCALE_ONE]
    scaled = [candidate for candidate in others if _has_kv_only(candidate.name, layers)]
    unfit = list_unfit_scales(SCALE_ONE, layers)
    if others and not scaled:
        return _list_verdicts(others)
    if not scaled:
        return _advise_unscaled(unscaled, unfit)
    best = min(scaled, key=lambda candidate: candidate.kld_mean)
    error = errors.get(best.name)
    if unfit and list_unfit_scales(best.name, layers) and not _is_less(best, unscaled, error):
        return (
            f"{_describe_layers(unfit)} at scale 1.0, and {best.name} does not fix it "
            f"({_format_klds(unscaled, best)}): calibrate, or leave the KV cache unquantized."
        )
    return _advise_scaled(unscaled, best, unfit, error)


def _list_verdicts(candidates: Sequence[CandidateResult]) -> str:
    verdicts = [f"{candidate.name}: {candidate.verdict}" for candidate in candidates]
    return f"{', '.join(verdicts)}." if verdicts else "nothing was compared."


def _has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q", "p"}


def _is_fine(candidate: CandidateResult) -> bool:
    return candidate.verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}


def _advise_unscaled(unscaled: CandidateResult, unfit: Sequence[LayerResult]) -> str:
    cost = f"KLD {format_kld(unscaled.kld_mean)}, {unscaled.verdict_why}"
    if unfit:
        return f"{_describe_layers(unfit)} at scale 1.0 ({cost}); calibrate."
    if _is_fine(unscaled):
        return f"this model does not need KV scales: at scale 1.0 {cost}{_qualify(unscaled)}."
    if unscaled.ppl_ratio_se is None:
        return f"whether this model needs KV scales is unknown: at scale 1.0 {cost}."
    return f"scale 1.0 costs accuracy ({cost}), though no layer stands out; calibrate."


def _advise_scaled(
    unscaled: CandidateResult,
    best: CandidateResult,
    unfit: Sequence[LayerResult],
    error: float | None,
) -> str:
    klds = _format_klds(unscaled, best)
    if _is_less(unscaled, best, error):
        return f"scale 1.0 is better than {best.name} ({klds}): do not use these scales."
    if unfit:
        return f"{_describe_layers(unfit)} at scale 1.0; use {best.name} ({klds})."
    if _is_less(best, unscaled, error):
        return f"scales help: use {best.name} ({klds})."
    return _advise_equal(unscaled, best, klds)


def _format_klds(unscaled: CandidateResult, best: CandidateResult) -> str:
    return f"KLD {format_kld(unscaled.kld_mean)} at scale 1.0 against {format_kld(best.kld_mean)}"


def _advise_equal(unscaled: CandidateResult, best: CandidateResult, klds: str) -> str:
    """Choose between scale 1.0 and scales whose divergence is about the same."""
    if unscaled.ppl_ratio_se is None:
        return f"whether scales help is unknown ({klds} with {best.name}): use more text."
    if _is_fine(best) and not _is_fine(unscaled):
        return f"use {best.name}, which passes: {unscaled.verdict_why} at scale 1.0 ({klds})."
    if _is_fine(unscaled):
        return f"this model does not need KV scales: {klds} with {best.name}{_qualify(unscaled)}."
    return (
        f"scales change nothing here ({klds} with {best.name}): the loss comes from FP8 "
        f"itself ({unscaled.verdict_why})."
    )


def _is_less(one: CandidateResult, other: CandidateResult, error: float | None) -> bool:
    """Tell whether the divergence of `one` is significantly and notably less than the other's."""
    difference = other.kld_mean - one.kld_mean
    is_sure = error is not None and difference > _SURE * error
    return is_sure and other.kld_mean > one.kld_mean * NOTABLE_KLD


def _qualify(candidate: CandidateResult) -> str:
    """Point out that the text is too short for the precision of a gate."""
    if candidate.ppl_ratio_se is None:
        return " (the ratio's error is unknown: use more text)"
    if candidate.ppl_ratio_se <= LARGEST_SE:
        return ""
    return f" (the ratio's error of {candidate.ppl_ratio_se:.3f} is large: use more text)"


def _describe_layers(rows: Sequence[LayerResult]) -> str:
    parts = []
    for verb, clips in (("clip", True), ("underflow", False)):
        layers = sorted({row.layer for row in rows if (row.clipped > CLIPPED) is clips})
        if layers:
            parts.append(f"{_name_layers(layers)} {verb}{'s' if len(layers) == 1 else ''}")
    return " and ".join(parts)


def _name_layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    shown = ", ".join(map(str, layers[:-1]))
    return f"layers {shown} and {layers[-1]}"
