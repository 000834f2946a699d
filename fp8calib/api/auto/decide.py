"""The decisions of `auto`, from the figures of a verification."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from fp8calib.api.auto.report import Decision
from fp8calib.errors import cut_list
from fp8calib.fp8.schemes import SCHEMES, InputScaling
from fp8calib.verification.report import SCALE_ONE, CandidateResult, Remedy, Verdict, VerifyReport
from fp8calib.verification.report import format_kld as _kld

KV_SCALES = "kv-scales"
KV_AND_Q_SCALES = "kv-and-q-scales"
_KV = (KV_SCALES, KV_AND_Q_SCALES)
_FAILING = (Verdict.FAIL, Verdict.CANNOT_TELL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was decided about one part of the model; None: it stays unquantized."""

    name: str | None
    decisions: tuple[Decision, ...]
    closest: str = ""
    """Where nothing passes: the candidate with the smallest loss, and its verdict."""
    is_unknown: bool = False
    """Nothing passes, and nothing fails either: there is too little text."""


def passes(candidate: CandidateResult) -> bool:
    """Whether a candidate passes its gate, as the exit code of `verify --gate` tells."""
    return candidate.verdict not in _FAILING


def choose_kv(report: VerifyReport, unfit_queries: Mapping[int, float], unused: str = "") -> Choice:
    """Choose the scales of the KV cache: none, those of K and V, or those of q too.

    `unused` says why the engine does not use KV scales of this model; empty where it does.
    """
    found = {each.name: each for each in report.candidates}
    scaled = [found[name] for name in _KV if name in found]
    answer = {Remedy.SERVE: "no", Remedy.NONE: "unknown"}.get(report.remedy, "yes")
    one = found.get(SCALE_ONE)
    if report.remedy is Remedy.CALIBRATE and one and _loss(one) < min(map(_loss, scaled)):
        answer = "unknown"
    why = report.conclusion.removeprefix("this model does not need KV scales: ")
    if answer == "no" and not unused:
        why += " They are written all the same: other text may need them."
    needs = Decision(question="does the model need KV scales?", answer=answer, why=why)
    queries = _decide_query(found, unfit_queries)
    wanted = KV_AND_Q_SCALES if queries.answer == "yes" else KV_SCALES
    best = found[wanted]
    if passes(best) and not unused:
        return Choice(name=wanted, decisions=(needs, queries))
    left = Decision(
        question="which KV scales are written?",
        answer="none",
        why=f"the KV cache stays in 16 bits: {unused or _describe(best)}",
    )
    return Choice(
        name=None,
        decisions=(needs, queries, left),
        closest=_describe(min(scaled, key=_loss)),
        is_unknown=best.verdict is Verdict.CANNOT_TELL,
    )


def _decide_query(
    found: Mapping[str, CandidateResult], unfit_queries: Mapping[int, float]
) -> Decision:
    question = "does q need scales?"
    if not unfit_queries or KV_AND_Q_SCALES not in found:
        why = "in no layer does q clip or underflow at scale 1.0"
        return Decision(question=question, answer="no", why=why)
    without, with_q = (found[name] for name in _KV)
    layers = cut_list([f"{layer} ({amax:.4g})" for layer, amax in unfit_queries.items()], 6)
    figures = f"KLD {_kld(with_q.kld_mean)} with q scales, {_kld(without.kld_mean)} without"
    if _loss(with_q) < _loss(without):
        why = f"q clips or underflows at scale 1.0 (layer and amax: {layers}); {figures}"
        return Decision(question=question, answer="yes", why=why)
    why = f"q has unusual magnitudes (layer and amax: {layers}), but they change nothing: {figures}"
    return Decision(question=question, answer="no", why=why)


def choose_scheme(report: VerifyReport, refused: Mapping[str, str]) -> Choice:
    """Choose the scheme of weights and inputs with the smallest loss that passes.

    Schemes with FP8 inputs come first: only these multiply in FP8. `refused` says why a scheme
    cannot be used.
    """
    found = [each for each in report.candidates if each.name in SCHEMES]
    usable = [each for each in found if each.name not in refused]
    passing = sorted(filter(passes, usable), key=_loss)
    multiplying = [each for each in passing if has_fp8_inputs(each.name)]
    figures = "; ".join(
        [
            *(_describe(each) for each in sorted(usable, key=_loss)),
            *(f"{name}: {why}" for name, why in refused.items()),
        ]
    )
    question = "which scheme is written?"
    if chosen := next(iter(multiplying or passing), None):
        why = figures
        if not multiplying:
            why = f"no scheme with FP8 inputs passes, so products stay in 16 bits; {figures}"
        elif not has_fp8_inputs(passing[0].name):
            why = f"schemes with FP8 inputs come first, as only these multiply in FP8; {figures}"
        decision = Decision(question=question, answer=chosen.name, why=why)
        return Choice(name=chosen.name, decisions=(decision,))
    closest = min(usable, key=_loss, default=None)
    return Choice(
        name=None,
        decisions=(Decision(question=question, answer="none", why=figures),),
        closest="no scheme can be used: choose another --engine"
        if closest is None
        else _describe(closest),
        is_unknown=bool(usable) and all(each.verdict is Verdict.CANNOT_TELL for each in usable),
    )


def choose_fallback(report: VerifyReport, refused: Iterable[str]) -> str | None:
    """Name the scheme with FP8 inputs and the smallest loss, where none passes whole."""
    usable = [
        each
        for each in report.candidates
        if each.name in SCHEMES and each.name not in refused and has_fp8_inputs(each.name)
    ]
    return min(usable, key=_loss).name if usable else None


def choose_left_layers(
    report: VerifyReport, scheme: str, ranked: Sequence[int], counts: Sequence[int]
) -> tuple[tuple[int, ...], Decision] | None:
    """Choose the fewest layers that must stay unquantized; None where all of `counts` fail.

    `ranked` are the layers, the most sensitive first; the candidates are named by their counts.
    """
    found = {each.name: each for each in report.candidates}
    for count in counts:
        candidate = found[str(count)]
        if passes(candidate):
            left = tuple(sorted(ranked[:count]))
            why = (
                "quantized one at a time, they lose most; with them in 16 bits, "
                f"{candidate.verdict_why}"
            )
            return left, Decision(
                question="which layers stay unquantized, so that FP8 inputs pass?",
                answer=f"{', '.join(map(str, left))}, in {scheme}",
                why=why,
            )
    return None


def has_fp8_inputs(scheme: str) -> bool:
    """Whether a scheme multiplies in FP8."""
    return SCHEMES[scheme].inputs is not InputScaling.NONE


def _loss(candidate: CandidateResult) -> float:
    assert candidate.kld_mean is not None  # noqa: S101 -- of an emulation it is always known
    return candidate.kld_mean


def _describe(candidate: CandidateResult) -> str:
    name = "scale 1.0" if candidate.name == SCALE_ONE else candidate.name
    return f"{name}: {candidate.verdict} ({candidate.verdict_why}), KLD {_kld(candidate.kld_mean)}"
