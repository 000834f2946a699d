"""The decisions of `auto`, from the figures of a verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fp8calib.errors import cut_list
from fp8calib.fp8.schemes import SCHEMES, InputScaling
from fp8calib.recipe import Quantize
from fp8calib.results.auto import AnsweredQuestion
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    PairedAnswer,
    PairedResult,
    Verdict,
    VerifyReport,
    describe_pair,
)

KV_SCALES = "kv-scales"
KV_AND_Q_SCALES = "kv-and-q-scales"
_KV = (KV_SCALES, KV_AND_Q_SCALES)


@dataclass(frozen=True, slots=True, kw_only=True)
class KvChoice:
    """The scales of the KV cache that are worth writing; None: it stays in 16 bits."""

    name: str | None
    wanted: str
    """The candidate that was judged, which `name` is if it is worth writing."""
    others: tuple[str, ...]
    """The other scales that the text does not rule out."""
    decisions: tuple[AnsweredQuestion, ...]
    left_out: AnsweredQuestion | None
    """Why no scales are worth writing; None where `name` is."""
    closest: str
    """The candidate with the smallest loss, and its verdict."""
    is_unknown: bool
    """Whether there is too little text to judge them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """What is written, and judged as a whole."""

    scheme: str | None
    """None: the weights stay in 16 bits."""
    kv: str | None
    """None: the KV cache stays in 16 bits."""
    left: tuple[int, ...] = ()
    """Without a scheme: the layers whose KV cache stays in 16 bits."""
    planned: Quantize | None = None
    """What a plan chose, where no scheme passes for all linears."""

    def __str__(self) -> str:
        layers = f" without layers {', '.join(map(str, self.left))}" if self.left else ""
        cache = "KV cache in 16 bits" if self.kv is None else self.kv
        if self.scheme is None:
            return f"weights in 16 bits, {cache}{layers}"
        planned = "" if self.planned is None else f" as planned ({_describe_mix(self.planned)})"
        return f"{self.scheme}{planned}, {cache}"


def _describe_mix(planned: Quantize) -> str:
    """Count the patterns of a plan."""
    parts = [f"{len(planned.ignore)} in 16 bits"] if planned.ignore else []
    counts = Counter(planned.layer_schemes.values())
    return ", ".join([*parts, *(f"{count} in {name}" for name, count in counts.items())])


def passes(candidate: CandidateResult) -> bool:
    """Whether a candidate passes its gate: a warning is no pass."""
    return candidate.verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}


def choose_kv(
    report: VerifyReport, unfit_queries: Mapping[int, float], unused: str = ""
) -> KvChoice:
    """Choose the scales of the KV cache: none, those of K and V, or those of q too.

    `unused` says why the engine does not use KV scales of this model; empty where it does.
    """
    found = {each.name: each for each in report.candidates}
    scaled = [found[name] for name in _KV if name in found]
    need = report.kv
    needs = AnsweredQuestion(
        question="does the model need KV scales?",
        answer="unknown" if need is None or need.answer == "cannot-tell" else need.answer,
        why=need.why if need else "the engine quantizes no K, V or q of this model",
    )
    queries, has_queries = _decide_query(report, found, unfit_queries)
    wanted = found[KV_AND_Q_SCALES if has_queries else KV_SCALES]
    is_written = not unused and _may_pass(wanted)
    left = AnsweredQuestion(
        question="which KV scales are written?",
        answer="none",
        why=f"the KV cache stays in 16 bits: {unused or _describe(wanted)}",
    )
    return KvChoice(
        name=wanted.name if is_written else None,
        wanted=wanted.name,
        others=tuple(each.name for each in scaled if each is not wanted and _may_pass(each)),
        decisions=(needs, queries),
        left_out=None if is_written else left,
        closest=_describe(min(scaled, key=_loss)),
        is_unknown=not is_written and wanted.verdict is Verdict.CANNOT_TELL,
    )


def list_media(report: VerifyReport) -> Iterator[AnsweredQuestion]:
    """Say of each candidate with static scales whether its calibration needed media."""
    answers = {
        PairedAnswer.WORSE: "yes",
        PairedAnswer.BETTER: "no",
        PairedAnswer.NO_DIFFERENCE: "no",
        PairedAnswer.CANNOT_TELL: "unknown",
    }
    for found in report.media:
        yield AnsweredQuestion(
            question=f"does the calibration of {found.candidate} need media?",
            answer=answers[found.difference.answer],
            why=found.sentence,
        )


def describe_cache_type(report: VerifyReport) -> AnsweredQuestion:
    """Describe which type of the KV cache is recommended on the GPU that serves."""
    decision = report.decision
    return AnsweredQuestion(
        question=f"which type of the KV cache on {report.gpu}?",
        answer=decision.kv_cache or "unknown",
        why=decision.kv_cache_why or "the engine stores no other type of this model's cache",
    )


def _may_pass(candidate: CandidateResult) -> bool:
    return candidate.verdict not in {Verdict.FAIL, Verdict.CANNOT_TELL}


def explain_written(needs: AnsweredQuestion) -> AnsweredQuestion:
    """Say why KV scales are written that the model does not need."""
    if needs.answer != "no":
        return needs
    why = f"{needs.why} They are written all the same: other text may need them."
    return needs.model_copy(update={"why": why})


def _decide_query(
    report: VerifyReport,
    found: Mapping[str, CandidateResult],
    unfit_queries: Mapping[int, float],
) -> tuple[AnsweredQuestion, bool]:
    """Decide whether q needs scales, and whether they are preferred."""
    question = "does q need scales?"
    if not unfit_queries or KV_AND_Q_SCALES not in found:
        why = "in no layer does q clip or underflow at scale 1.0"
        return AnsweredQuestion(question=question, answer="no", why=why), False
    paired = find_pair(report, KV_AND_Q_SCALES, KV_SCALES)
    layers = cut_list([f"{layer} ({amax:.4g})" for layer, amax in unfit_queries.items()], 6)
    answer, is_preferred = _QUERY_ANSWERS[paired.answer]
    why = (
        f"q clips or underflows at scale 1.0 (layer and amax: {layers}); {KV_AND_Q_SCALES} "
        f"{describe_pair(paired)} against {KV_SCALES}"
    )
    if answer == "unknown":
        why = f"{why}. They are preferred: scales that fit clip nothing."
    return AnsweredQuestion(question=question, answer=answer, why=why), is_preferred


_QUERY_ANSWERS = {
    PairedAnswer.BETTER: ("yes", True),
    PairedAnswer.WORSE: ("no", False),
    PairedAnswer.NO_DIFFERENCE: ("no", False),
    PairedAnswer.CANNOT_TELL: ("unknown", True),
}
"""Whether q needs scales, and whether they are preferred."""


def find_pair(report: VerifyReport, candidate: str, base: str) -> PairedResult:
    """Find the paired comparison of two candidates of one kind."""
    return next(
        each for each in report.comparisons if (each.candidate, each.base) == (candidate, base)
    )


def _list_usable(report: VerifyReport, refused: Mapping[str, str]) -> list[CandidateResult]:
    return [each for each in report.candidates if each.name in SCHEMES and each.name not in refused]


def rank_schemes(report: VerifyReport, refused: Mapping[str, str]) -> list[CandidateResult]:
    """List the schemes that pass, those with FP8 inputs first, each kind by its loss.

    Only these multiply in FP8. `refused` says why a scheme cannot be used.
    """
    passing = sorted(filter(passes, _list_usable(report, refused)), key=_loss)
    return sorted(passing, key=lambda each: not has_fp8_inputs(each.name))


def describe_schemes(report: VerifyReport, refused: Mapping[str, str]) -> str:
    """Describe the figures of all schemes, and why some cannot be used."""
    ranked = sorted(_list_usable(report, refused), key=_loss)
    figures = [_describe(each) for each in ranked]
    if len(ranked) > 1:
        best, *others = ranked
        pairs = [find_pair(report, other.name, best.name) for other in others]
        described = [f"{pair.candidate} {describe_pair(pair)}" for pair in pairs]
        figures.append(f"against {best.name}: {'; '.join(described)}")
    return "; ".join([*figures, *(f"{name}: {why}" for name, why in refused.items())])


def list_combinations(
    ranked: Sequence[CandidateResult], kv: KvChoice, gate: str
) -> Iterator[Combination]:
    """List what could be written, the most useful first.

    Each scheme with an FP8 KV cache, then with one in 16 bits; of the KV cache alone, each kind of
    scales.
    """
    caches = (None,) if kv.name is None else (kv.name, None)
    if gate == "kv":
        for name in (*([kv.name] if kv.name else []), *kv.others):
            yield Combination(scheme=None, kv=name)
        return
    for scheme in ranked:
        for cache in caches:
            yield Combination(scheme=scheme.name, kv=cache)


def list_fallbacks(report: VerifyReport, refused: Mapping[str, str]) -> list[str]:
    """List the schemes with FP8 inputs that a plan mixes where none passes whole."""
    return [each.name for each in _list_usable(report, refused) if has_fp8_inputs(each.name)]


def find_closest(report: VerifyReport, refused: Mapping[str, str]) -> tuple[str, bool]:
    """Describe the scheme with the smallest loss, and tell whether none could be judged."""
    usable = _list_usable(report, refused)
    if not usable:
        return "no scheme can be used: choose another --engine", False
    is_unknown = all(each.verdict is Verdict.CANNOT_TELL for each in usable)
    return _describe(min(usable, key=_loss)), is_unknown


def has_fp8_inputs(scheme: str) -> bool:
    """Whether a scheme multiplies in FP8."""
    return SCHEMES[scheme].inputs is not InputScaling.NONE


def _loss(candidate: CandidateResult) -> float:
    assert candidate.kld_mean is not None  # noqa: S101 -- of an emulation it is always known
    return candidate.kld_mean


def _describe(candidate: CandidateResult) -> str:
    name = "scale 1.0" if candidate.name == SCALE_ONE else candidate.name
    kld = format_mean_kld(candidate.kld_mean, candidate.kld_se)
    return f"{name}: {candidate.verdict} ({candidate.verdict_why}), KLD {kld}"
