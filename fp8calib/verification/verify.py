"""Verify: score a model and its FP8 candidates on the same text, and report the differences."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.data.sequences import Batch, DataPlan, batches, replace_sequences, take_sequences
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.formats.table import ScaleTable
from fp8calib.machine.progress import Progress
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.verification.damage_rows import (
    PER_HEAD,
    clipped_unscaled,
    diagnose,
    list_layers,
    measure_fits,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Quantizer, ScaleRange
from fp8calib.verification.judge.damaged import Fits, describe_damage
from fp8calib.verification.judge.decide import conclude, explain_broken, has_kv_only
from fp8calib.verification.judge.gates import GATES, Gate, correct_if_misleading, judge
from fp8calib.verification.judge.kv_need import assess_need, find_fitting, list_losing
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    KvNeed,
    LayerResult,
    NoiseResult,
    PairedResult,
    ReferenceResult,
    RefusedCandidate,
    RuleResult,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.score import Scores, score
from fp8calib.verification.summary import (
    average,
    compute_ppl,
    list_figures,
    summarize,
    summarize_positions,
)
from fp8calib.verification.token_scores import TokenScores

_NOISE_SEQUENCES, _NOISE_BATCH = 16, 4
_FITTED_NAME = "scales that fit"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is compared with an unquantized model, on which text; made before a weight is read."""

    model: str
    """Its name."""
    fingerprint: str = ""
    """Of its config and weights (`fingerprint_model`)."""
    geometry: ModelGeometry
    numerics: Numerics
    """How the engine computes."""
    candidates: tuple[Candidate, ...]
    """In the order of the report."""
    plan: DataPlan
    batch_size: int = 1
    engine: str = ""
    engine_version: str = ""
    dtype: str = "float32"
    device: str = "cpu"
    rules: Mapping[str, Candidate] = field(default_factory=dict)
    """Scale rules to rank, by name; all from the same statistics."""
    stats: CalibrationStats | None = None
    """The first statistics of the candidates."""
    stats_of: str = ""
    """The name of their candidate."""
    tables: Mapping[str, ScaleTable] = field(default_factory=dict)
    """The KV scales of the candidates that have these alone, by name."""
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""
    per_head: Mapping[Site, Quantizer] = field(default_factory=dict)
    """Those of the per-head scales of `diagnosis_of`, where they are known."""
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis compares with 1.0; empty without one."""
    is_diagnosed_per_head: bool = False
    """Whether these are per head themselves."""
    gate: Gate | None = None
    """None: each candidate's own."""
    is_strict: bool = False
    """Whether a warning of the gate is a failure."""
    unusable: Collection[str] = ()
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    droppable: Collection[str] = ()
    """The candidates of files: one that is damaged is left out while another is left."""
    refused: tuple[RefusedCandidate, ...] = ()
    """Those that are left out."""
    warnings: tuple[str, ...] = ()

    @property
    def batches(self) -> list[Batch]:
        """The text, in batches."""
        return list(batches(self.plan, self.batch_size))

    def list_scored(self, others: Sequence[Candidate] = ()) -> list[Candidate]:
        """List what is scored together: the candidates, what runs beside them, and the rules."""
        rules = (replace(each, name=_rule_key(name)) for name, each in self.rules.items())
        return [*self.candidates, *others, *rules]

    def leave_out(self, error: ModelError | VerificationError) -> Verification:
        """Leave out the candidate that an error is about.

        Raises:
            ModelError | VerificationError: this error, if it is about none, or the last.
        """
        rest = [name for name in self.droppable if name != error.candidate]
        if not rest or len(rest) == len(self.droppable):
            raise error
        refused = RefusedCandidate(name=error.candidate, why=error.message)
        is_diagnosed = self.diagnosis_of != error.candidate
        return replace(
            self,
            candidates=tuple(c for c in self.candidates if c.name != error.candidate),
            droppable=rest,
            refused=(*self.refused, refused),
            warnings=(*self.warnings, str(refused)),
            diagnosis_of=self.diagnosis_of if is_diagnosed else "",
            per_head=self.per_head if is_diagnosed else {},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """The report, and the scores that it is made from."""

    verification: Verification
    """Without the candidates that failed."""
    report: VerifyReport
    scores: Scores

    @property
    def logprobs(self) -> dict[str, torch.Tensor]:
        """`reference` and the candidates by name: fp32 [N], sequences in order."""
        found = self.scores.candidates
        mine = {each.name: found[each.name].logprobs for each in self.verification.candidates}
        return {"reference": self.scores.reference.logprobs, **mine}


def verify(
    asked: Verification,
    model: PreparedModel | StreamedModel,
    progress: Progress,
    *,
    others: Sequence[Candidate] = (),
    watched: Sequence[torch.Tensor] | None = None,
    measures_noise: bool = False,
) -> Verified:
    """Compare the model with every candidate, and score `others` beside them.

    Args:
        asked: the candidates and the text.
        model: the unquantized model.
        progress: hears of tokens.
        others: candidates that are no part of the report, with names of their own.
        watched: as `score` takes it.
        measures_noise: whether the unquantized model runs again, in batches of another size.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or inf, or weights cannot be replaced.
    """
    started = time.monotonic()
    text = asked.batches
    while True:
        hooks = MeasurementHooks(_list_scale_kinds(asked), set(_list_scalable(asked)))
        try:
            scores = score(
                *(model, asked.list_scored(others), text, hooks),
                progress=progress,
                stage="verifying",
                watched=watched,
            )
            break
        except (ModelError, VerificationError) as error:
            asked = asked.leave_out(error)
    _require_quantized(asked.candidates, scores)
    layer_of = asked.geometry.index_modules()
    measured = {
        each.name: measure_fits(hooks.found, each.name, layer_of) for each in asked.candidates
    }
    fits = {name: found for name, found in measured.items() if found}
    fitted = _score_fitted(asked, scores, fits, model, text, progress)
    noise = None
    if measures_noise:
        few, size = choose_noise_text(asked.plan, asked.batch_size)
        again = score(model, (), list(batches(few, size)), progress=progress, stage="noise floor")
        noise = compare_noise(scores.reference.logprobs, again.reference.logprobs, asked.plan, few)
    vocab_size = int(model.model.config.get_text_config(decoder=True).vocab_size)
    report = _build_report(asked, scores, fits, fitted, vocab_size)
    diagnosis = diagnose(
        hooks.found,
        layer_of,
        "" if asked.is_diagnosed_per_head else asked.diagnosis_of,
        {} if asked.stats is None else clipped_unscaled(asked.stats, asked.fmt),
    )
    timed = {"diagnosis": diagnosis, "noise": noise, "duration_s": time.monotonic() - started}
    report = conclude(report.model_copy(update=timed))
    return Verified(verification=asked, report=report, scores=scores)


# --- what is measured -----------------------------------------------------------------------------


def _list_scale_kinds(asked: Verification) -> dict[str, Mapping[Site, Quantizer]]:
    """List what is measured on K, V and q: each candidate's scales, and per-head ones."""
    if not any(candidate.fitted for candidate in asked.candidates):
        return {}
    kinds = {
        candidate.name: {
            site: quantizer
            for site, quantizer in candidate.quantizers.items()
            if site in candidate.fitted and site.role is not Role.P
        }
        for candidate in asked.candidates
    }
    return {**kinds, PER_HEAD: asked.per_head}


def _list_scalable(asked: Verification) -> Iterator[tuple[str, Site]]:
    """List the sites of each candidate where its engine uses a scale."""
    for candidate in asked.candidates:
        for site, quantizer in candidate.fitted.items():
            if not isinstance(quantizer.scale, torch.Tensor):
                yield candidate.name, site


def _require_quantized(candidates: Sequence[Candidate], scores: Scores) -> None:
    """Refuse the scores of a candidate that met none of the tensors it quantizes.

    Raises:
        VerificationError: naming the candidate.
    """
    for candidate in candidates:
        asked = candidate.quantizers
        if asked and not candidate.weights and not scores.damage[candidate.name]:
            raise VerificationError(
                f"{candidate.name}: nothing was quantized: the model ran, and no hook saw "
                f"{next(iter(asked))} or another site",
                hint="this class of the model is not supported: report it with its config",
            )


def _score_fitted(
    asked: Verification,
    scores: Scores,
    fits: Fits,
    model: PreparedModel | StreamedModel,
    text: Sequence[Batch],
    progress: Progress,
) -> TokenScores | None:
    """Score the model with scales that fit, which tell what scale 1.0 adds to the cost of FP8.

    Where scale 1.0 loses nothing, it adds nothing; where the scales of a candidate fit, that
    candidate tells. None too where only FP8 weights are compared.
    """
    unscaled = next((each for each in asked.candidates if each.name == SCALE_ONE), None)
    others = [each for each in asked.candidates if each.name != SCALE_ONE]
    cached = [each.name for each in others if not each.weights]
    is_lossless = not list_losing(fits.get(SCALE_ONE, ()))
    if unscaled is None or is_lossless or (others and not cached):
        return None
    if (fitting := find_fitting(cached, fits)) is not None:
        return scores.candidates[fitting]
    fitted = Candidate(name=_FITTED_NAME, quantizers=unscaled.fitted)
    found = score(model, [fitted], text, progress=progress, stage=_FITTED_NAME)
    return found.candidates[_FITTED_NAME]


def compare_noise(
    before: torch.Tensor, again: torch.Tensor, plan: DataPlan, few: DataPlan
) -> NoiseResult:
    """Compare the scores of the first sequences, run again in batches of another size."""
    whole = [length - 1 for length in plan.lengths[: len(few.sequences)]]
    parts = torch.split(before[: sum(whole)], whole)
    kept = [each[: length - 1] for each, length in zip(parts, few.lengths, strict=True)]
    changes = again.double() - torch.cat(kept).double()
    return NoiseResult(tokens=len(again), kld=float(changes.square().mean()) / 2)


def choose_noise_text(plan: DataPlan, batch_size: int) -> tuple[DataPlan, int]:
    """Choose the text of the noise floor, and the size of its batches.

    Several sequences in place of one are cut, so that a batch has no more tokens than before. Those
    with media stay: each is a batch of its own.
    """
    few = take_sequences(plan, 0, _NOISE_SEQUENCES)
    if batch_size > 1:
        return few, 1
    cut = [
        sequence if index in few.media else sequence[: max(2, len(sequence) // _NOISE_BATCH)]
        for index, sequence in enumerate(few.sequences)
    ]
    return replace_sequences(few, cut, few.media), _NOISE_BATCH


# --- the report -----------------------------------------------------------------------------------


def _build_report(
    asked: Verification,
    scores: Scores,
    fits: Fits,
    fitted: TokenScores | None,
    vocab_size: int,
) -> VerifyReport:
    """Build the report, without its conclusion."""
    lengths = asked.plan.lengths
    layers = tuple(_list_layer_rows(asked, scores))
    ppl = compute_ppl(scores.reference.logprobs)
    broken = explain_broken(ppl, vocab_size)
    results = [_make_result(each, asked, scores, fits, layers) for each in asked.candidates]
    if broken:
        results = [_withhold(each) for each in results]
    pairs = _pair_candidates(results, layers, scores, lengths)
    return VerifyReport(
        model=asked.model,
        engine=asked.engine or asked.numerics.name,
        engine_version=asked.engine_version,
        dtype=asked.dtype,
        device=asked.device,
        data=asked.plan.sources,
        tokens=len(scores.reference.logprobs),
        sequences=len(lengths),
        seq_len=asked.plan.seq_len,
        duration_s=0.0,
        reference=ReferenceResult(ppl=ppl),
        candidates=tuple(results),
        refused=asked.refused,
        layers=layers,
        decision=Decision(headline=""),
        kv=_assess_need(results, layers, scores, fits, fitted, pairs, lengths),
        comparisons=pairs,
        diagnosis_of=asked.diagnosis_of,
        rules=_rank_rules(asked, scores),
        warnings=(*asked.warnings, *_list_unmet_sites(asked, scores)),
        fits=fits,
        unusable=tuple(asked.unusable),
        is_strict=asked.is_strict,
        broken=broken,
    )


def _withhold(result: CandidateResult) -> CandidateResult:
    """Withhold a verdict, because the model knows nothing: only a failure is certain."""
    if result.verdict is Verdict.FAIL:
        return result
    why = f"{result.verdict_why}, but the unquantized model predicts no better than chance"
    return result.model_copy(update={"verdict": Verdict.CANNOT_TELL, "verdict_why": why})


def _pair_candidates(
    results: Sequence[CandidateResult],
    layers: Sequence[LayerResult],
    scores: Scores,
    lengths: Sequence[int],
) -> tuple[PairedResult, ...]:
    """Compare each with each: KV scales and scale 1.0, and candidates with FP8 weights."""
    klds = {name: each.klds for name, each in scores.candidates.items()}
    cached = [one for one in results if has_kv_only(one.name, layers)]
    weights = [one for one in results if one not in cached]
    return tuple(
        compare_paired(one.name, base.name, klds, lengths)
        for kind in (cached, weights)
        for one in kind
        for base in kind
        if one is not base and one.name != SCALE_ONE
    )


def _assess_need(
    results: Sequence[CandidateResult],
    layers: Sequence[LayerResult],
    scores: Scores,
    fits: Fits,
    fitted: TokenScores | None,
    pairs: Sequence[PairedResult],
    lengths: Sequence[int],
) -> KvNeed | None:
    """Answer whether KV scales are needed; None where only FP8 weights are compared."""
    others = [one.name for one in results if one.name != SCALE_ONE]
    is_asked = not others or any(has_kv_only(name, layers) for name in others)
    if SCALE_ONE not in fits or not is_asked:
        return None
    klds = {SCALE_ONE: scores.candidates[SCALE_ONE].klds}
    fp8, added = average(klds[SCALE_ONE], lengths), None
    if fitted is not None:
        klds[_FITTED_NAME] = fitted.klds
        fp8 = average(klds[_FITTED_NAME], lengths)
        added = compare_paired(SCALE_ONE, _FITTED_NAME, klds, lengths)
    removed = [pair for pair in pairs if pair.candidate in others]
    return assess_need(list_losing(fits[SCALE_ONE]), fp8, added, removed)


def _make_result(
    candidate: Candidate,
    asked: Verification,
    scores: Scores,
    fits: Fits,
    layers: Sequence[LayerResult],
) -> CandidateResult:
    mine, reference = scores.candidates[candidate.name], scores.reference
    lengths = asked.plan.lengths
    summary = summarize(mine, reference, lengths)
    gate = asked.gate or GATES[candidate.default_gate]
    verdict, why = correct_if_misleading(
        *judge(summary, gate),
        damage=describe_damage(candidate.name, layers, fits),
        summary=summary,
        gate=gate,
    )
    if overflowing := _find_overflow(candidate, scores):
        verdict, why = Verdict.FAIL, f"{asked.numerics.name} turns {overflowing}"
    return CandidateResult(
        name=candidate.name,
        description=candidate.description,
        **list_figures(summary),
        verdict=verdict,
        verdict_why=why,
        gate=gate.name,
        by_position=summarize_positions(mine.logprobs, reference.logprobs, lengths, mine.klds),
    )


def _list_unmet_sites(asked: Verification, scores: Scores) -> Iterator[str]:
    """Warn of sites that the engine quantizes and no hook sees, such as q of falcon."""
    for candidate in asked.candidates:
        met = scores.damage[candidate.name]
        missed = [site for site in candidate.quantizers if site not in met]
        if missed:
            yield (
                f"{candidate.name}: {cut_list(missed, 1)}: quantized by "
                f"{asked.numerics.name} but not emulated: the model computes it "
                "without a hook"
            )


def _find_overflow(candidate: Candidate, scores: Scores) -> str:
    """Describe values that overflow because the engine does not saturate; empty without any."""
    for site, sums in scores.damage[candidate.name].items():
        quantizer = candidate.quantizers.get(site)
        count = Damage(*sums.tolist()).clipped
        if quantizer is not None and not quantizer.saturates and count:
            return f"{count:.0f} values of {site} into NaN or inf; here they are saturated"
    return ""


def _list_layer_rows(asked: Verification, scores: Scores) -> Iterator[LayerResult]:
    layer_of = asked.geometry.index_modules()
    for candidate in asked.candidates:
        quantizers = candidate.quantizers
        scales = {site: ScaleRange.of_quantizer(each) for site, each in quantizers.items()}
        scales |= scores.weight_scales[candidate.name]
        yield from list_layers(candidate.name, scores.damage[candidate.name], scales, layer_of)


def _rule_key(rule: str) -> str:
    return f"\0rule:{rule}"


def _rank_rules(asked: Verification, scores: Scores) -> tuple[RuleResult, ...]:
    """Rank the rules, the smallest divergence first."""
    lengths = asked.plan.lengths
    mine = {rule: scores.candidates[_rule_key(rule)] for rule in asked.rules}
    klds = {rule: each.klds for rule, each in mine.items()}
    found = {rule: summarize(each, scores.reference, lengths) for rule, each in mine.items()}
    ranked = sorted(found, key=lambda rule: found[rule].kld_mean or 0.0)
    return tuple(
        RuleResult(
            candidate=asked.stats_of,
            rule=rule,
            ppl_ratio=found[rule].ppl_ratio,
            ppl_ratio_se=found[rule].ppl_ratio_se,
            kld_mean=found[rule].kld_mean or 0.0,
            kld_se=found[rule].kld_se,
            against_best=None
            if rule == ranked[0]
            else compare_paired(rule, ranked[0], klds, lengths),
        )
        for rule in ranked
    )
