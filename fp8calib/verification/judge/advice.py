"""The report's conclusion: which scales are wrong, or whether scales are needed at all."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8calib.errors import format_ranges
from fp8calib.verification.judge.damaged import CLIPPED, list_unfit_scales
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    LayerResult,
    Remedy,
    Verdict,
    format_kld,
)

NOTABLE_KLD = 1.25
"""Scales that do not lower the mean KL divergence by this factor are not worth the effort."""
_SURE = 2.0
"""Divergences closer than this many standard errors of their difference count as equal."""
_MOST_NAMED = 6
"""More layers are named as ranges."""
_FAILING = (Verdict.FAIL, Verdict.CANNOT_TELL)
Errors = Mapping[str, float | None]
"""Standard error of a candidate's mean divergence minus that of scale 1.0; None: unknown."""


@dataclass(frozen=True, slots=True)
class Advice:
    """The conclusion of a report."""

    text: str
    remedy: Remedy = Remedy.NONE
    candidate: str = ""
    """The candidate that the remedy is for."""
    conclusion: str = ""
    """The end of the text: what to do, without the scales that do not fit."""


def advise(
    candidates: Sequence[CandidateResult],
    layers: Sequence[LayerResult],
    errors: Errors,
    refused: Collection[str] = (),
) -> Advice:
    """Name the scales that do not fit, then say whether the KV cache needs scales.

    Where all candidates have FP8 weights, say which is best instead. `refused` are the candidates
    that the engine cannot load: none of them is recommended.
    """
    sentences = [
        text
        for candidate in candidates
        if candidate.name != SCALE_ONE and (text := _describe_unfit_scales(candidate, layers))
    ]
    weights = [
        each
        for each in candidates
        if each.name != SCALE_ONE and not _has_kv_only(each.name, layers)
    ]
    has_kv = len(weights) < sum(each.name != SCALE_ONE for each in candidates)
    found = _compare_with_one(candidates, layers, errors, refused)
    served = {Remedy.USE: found.candidate, Remedy.SERVE: SCALE_ONE}.get(found.remedy)
    if served in refused:
        text = f"{found.text} But the engine cannot load it: use another engine or format."
        found = Advice(text)
    if weights and has_kv:
        found = replace(found, text=f"{_advise_quantized(weights, refused).text} {found.text}")
    return replace(found, text=" ".join([*sentences, found.text]), conclusion=found.text)


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
    clips = row.clipped > CLIPPED or row.clipped > row.flushed
    if not clips and not row.flushed:
        return f"{where} is distorted: its SQNR is {row.sqnr_db:.1f} dB"
    lost = (
        f"{_format_percent(row.clipped)} of the values clip"
        if clips
        else f"{_format_percent(row.flushed)} of the values become zero"
    )
    verb = "clips" if clips else "underflows"
    if _is_unscaled_query(row):
        return f"{where} {verb}: there is no q_scale, so the engine uses 1.0; {lost}"
    return f"{where} {verb}: its scale is too {'small' if clips else 'large'}, {lost}"


def _is_unscaled_query(row: LayerResult) -> bool:
    return row.role == "q" and row.scale == 1.0


def _format_percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.001 else f"{share:.2g}"


def _compare_with_one(
    candidates: Sequence[CandidateResult],
    layers: Sequence[LayerResult],
    errors: Errors,
    refused: Collection[str],
) -> Advice:
    by_name = {candidate.name: candidate for candidate in candidates}
    unscaled = by_name.get(SCALE_ONE)
    if unscaled is None:
        verdicts = [f"{candidate.name}: {candidate.verdict}" for candidate in candidates]
        return Advice(f"{', '.join(verdicts)}." if verdicts else "nothing was compared.")
    others = [candidate for candidate in candidates if candidate.name != SCALE_ONE]
    scaled = [candidate for candidate in others if _has_kv_only(candidate.name, layers)]
    unfit = list_unfit_scales(SCALE_ONE, layers)
    if others and not scaled:
        return _advise_quantized(others, refused)
    if not scaled:
        return _advise_unscaled(unscaled, unfit)
    best = min(scaled, key=_kld)
    error = errors.get(best.name)
    broken = list_unfit_scales(best.name, layers)
    needs_query = any(map(_is_unscaled_query, broken))
    is_vain = bool(unfit and broken) and not _is_less(best, unscaled, error)
    if is_vain and not needs_query:
        return Advice(
            f"{_describe_layers(unfit)} at scale 1.0, and {best.name} does not fix it "
            f"({_format_klds(unscaled, best)}): calibrate, or leave the KV cache unquantized.",
            Remedy.CALIBRATE,
        )
    if best.verdict is Verdict.FAIL or is_vain:
        return _advise_failing(unscaled, best, broken, error)
    return _advise_scaled(unscaled, best, unfit, error)


def _advise_quantized(found: Sequence[CandidateResult], refused: Collection[str]) -> Advice:
    """Choose between candidates with FP8 weights: the smallest loss of those that pass."""
    listed = "; ".join(
        f"{each.name}: {each.verdict} (KLD {format_kld(each.kld_mean)}, {each.verdict_why}"
        f"{'; the engine cannot load it' if each.name in refused else ''})"
        for each in found
    )
    loadable = [each for each in found if each.name not in refused]
    if passing := [each for each in loadable if each.verdict not in _FAILING]:
        best = min(passing, key=_kld)
        choice = f"; use {best.name}" if len(found) > 1 else ""
        return Advice(f"{listed}{choice}.", Remedy.USE, best.name)
    if failing := [each for each in loadable if each.verdict is Verdict.FAIL]:
        text = f"{listed}; leave the most sensitive layers unquantized, or use another scheme."
        return Advice(text, Remedy.FIND_LAYERS, min(failing, key=_kld).name)
    return Advice(f"{listed}.")


def _has_kv_only(name: str, layers: Sequence[LayerResult]) -> bool:
    roles = {row.role for row in layers if row.candidate == name}
    return bool(roles) and roles <= {"k", "v", "q", "p"}


def _is_fine(candidate: CandidateResult) -> bool:
    return candidate.verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}


def _advise_unscaled(unscaled: CandidateResult, unfit: Sequence[LayerResult]) -> Advice:
    cost = f"KLD {format_kld(unscaled.kld_mean)}, {unscaled.verdict_why}"
    if unfit:
        text = f"{_describe_layers(unfit)} at scale 1.0 ({cost}); calibrate."
        return Advice(text, Remedy.CALIBRATE)
    if _is_fine(unscaled):
        return Advice(f"this model does not need KV scales: at scale 1.0 {cost}.", Remedy.SERVE)
    if unscaled.verdict is Verdict.CANNOT_TELL:
        return Advice(f"whether this model needs KV scales is unknown: at scale 1.0 {cost}.")
    text = (
        f"scale 1.0 costs accuracy ({cost}), though no layer stands out: calibrate to see whether "
        "scales help."
    )
    return Advice(text, Remedy.CALIBRATE)


def _advise_failing(
    unscaled: CandidateResult,
    best: CandidateResult,
    unfit: Sequence[LayerResult],
    error: float | None,
) -> Advice:
    """Say what helps where even the best candidate fails its gate."""
    failed = f"{best.name}: {best.verdict} ({best.verdict_why})"
    queries = sorted({row.layer for row in unfit if _is_unscaled_query(row)})
    if queries:
        need = "needs a scale" if len(queries) == 1 else "need scales"
        text = f"{failed}; q of {_name_layers(queries)} {need} too, and none is written."
        return Advice(text, Remedy.SCALE_QUERY, best.name)
    if _is_less(unscaled, best, error):
        return _advise_against(unscaled, best)
    if unfit:
        text = f"{failed}; {_describe_layers(unfit)} with its scales: calibrate."
        return Advice(text, Remedy.CALIBRATE)
    text = f"{failed}: leave the KV cache of some layers unquantized, or of all."
    return Advice(text, Remedy.FIND_LAYERS, best.name)


def _advise_scaled(
    unscaled: CandidateResult,
    best: CandidateResult,
    unfit: Sequence[LayerResult],
    error: float | None,
) -> Advice:
    klds = _format_klds(unscaled, best)
    if _is_less(unscaled, best, error):
        return _advise_against(unscaled, best)
    if unfit:
        text = f"{_describe_layers(unfit)} at scale 1.0; use {best.name} ({klds})."
        return Advice(text, Remedy.USE, best.name)
    if _is_less(best, unscaled, error):
        return Advice(f"scales help: use {best.name} ({klds}).", Remedy.USE, best.name)
    return _advise_equal(unscaled, best, klds)


def _advise_against(unscaled: CandidateResult, best: CandidateResult) -> Advice:
    text = f"scale 1.0 is better than {best.name} ({_format_klds(unscaled, best)})"
    if _is_fine(unscaled):
        return Advice(f"{text}: this model does not need KV scales.", Remedy.SERVE)
    return Advice(f"{text}: do not use these scales, calibrate.", Remedy.CALIBRATE)


def _format_klds(unscaled: CandidateResult, best: CandidateResult) -> str:
    return f"KLD {format_kld(unscaled.kld_mean)} at scale 1.0 against {format_kld(best.kld_mean)}"


def _advise_equal(unscaled: CandidateResult, best: CandidateResult, klds: str) -> Advice:
    """Choose between scale 1.0 and scales whose divergence is about the same."""
    if unscaled.verdict is Verdict.CANNOT_TELL:
        text = f"whether scales help is unknown ({klds} with {best.name}): use more text."
        return Advice(text)
    if _is_fine(best) and not _is_fine(unscaled):
        text = f"use {best.name}, which passes: {unscaled.verdict_why} at scale 1.0 ({klds})."
        return Advice(text, Remedy.USE, best.name)
    if _is_fine(unscaled):
        text = f"this model does not need KV scales: {klds} with {best.name}."
        return Advice(text, Remedy.SERVE)
    return Advice(
        f"scales change nothing here ({klds} with {best.name}): the loss comes from FP8 "
        f"itself ({unscaled.verdict_why})."
    )


def _is_less(one: CandidateResult, other: CandidateResult, error: float | None) -> bool:
    """Tell whether the divergence of `one` is significantly and notably less than the other's."""
    difference = _kld(other) - _kld(one)
    is_sure = error is not None and difference > _SURE * error
    return is_sure and _kld(other) > _kld(one) * NOTABLE_KLD


def _kld(candidate: CandidateResult) -> float:
    """Give the mean divergence of an emulated candidate, which is always known."""
    assert candidate.kld_mean is not None  # noqa: S101
    return candidate.kld_mean


def _describe_layers(rows: Sequence[LayerResult]) -> str:
    verbs: dict[tuple[int, ...], list[str]] = {}
    for verb, clips in (("clip", True), ("underflow", False)):
        layers = tuple(sorted({row.layer for row in rows if (row.clipped > CLIPPED) is clips}))
        if layers:
            verbs.setdefault(layers, []).append(f"{verb}s" if len(layers) == 1 else verb)
    return " and ".join(
        f"{_name_layers(layers)} {' and '.join(found)}" for layers, found in verbs.items()
    )


def _name_layers(layers: Sequence[int]) -> str:
    if len(layers) == 1:
        return f"layer {layers[0]}"
    if len(layers) > _MOST_NAMED:
        return f"layers {format_ranges(layers)}"
    shown = ", ".join(map(str, layers[:-1]))
    return f"layers {shown} and {layers[-1]}"
