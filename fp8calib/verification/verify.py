"""Verify: run a model and its FP8 emulations on the same text, and report the differences."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8calib.data.sequences import Batch, DataPlan, batches, replace_sequences, take_sequences
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.machine.progress import Progress
from fp8calib.model.prepared import PreparedModel
from fp8calib.run.streaming.model import StreamedModel
from fp8calib.verification.companion import Companion, ComparedText
from fp8calib.verification.damage_rows import (
    PER_HEAD,
    diagnose,
    list_layers,
    measure_fits,
)
from fp8calib.verification.decoding import compare_decoding, list_decode_emulations
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Quantizer, ScaleRange
from fp8calib.verification.judge.damaged import Fits, describe_damage
from fp8calib.verification.judge.decide import (
    Basis,
    decide,
    decide_kv,
    explain_broken,
    has_kv_only,
)
from fp8calib.verification.judge.gates import GATES, Gate, correct_if_misleading, judge
from fp8calib.verification.judge.kv_need import (
    assess_need,
    find_fitting,
    list_losing,
)
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The unquantized model that candidates are compared with."""

    name: str
    model: PreparedModel | StreamedModel
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """The candidates to compare with a model, and the settings of the report."""

    numerics: Numerics
    """How the engine computes, the first of several."""
    candidates: tuple[Candidate, ...]
    """In the order of the report."""
    engine: str = ""
    """The name of the engine, or of several; empty: that of `numerics`."""
    engine_version: str = ""
    rules: Mapping[str, Candidate] = field(default_factory=dict)
    """Scale rules to rank, by name; all from the same statistics."""
    rules_of: str = ""
    """The candidate that the rules are applied to."""
    per_head: Mapping[Site, Quantizer] = field(default_factory=dict)
    """Those of the per-head scales of `diagnosis_of`, where they are known."""
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis uses; empty without one."""
    is_diagnosed_per_head: bool = False
    """Whether these are per head themselves."""
    calibration_clipped: Mapping[Site, float] = field(default_factory=dict)
    """Share of K and V that clips at scale 1.0, by the statistics' histograms."""
    gate: Gate | None = None
    """None: each candidate's own."""
    is_strict: bool = False
    """Whether a warning of the gate is a failure."""
    others: Mapping[str, Candidate] = field(default_factory=dict)
    """What a companion lets run beside the candidates, by name."""
    measures_noise: bool = False
    """Whether the unquantized model runs again, in batches of another size."""
    scores_decoding: bool = False
    """Whether text is also scored as it is served: a prompt, then tokens one at a time."""
    refused: Collection[str] = ()
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    opened: Collection[str] = ()
    """The candidates of files: one that is damaged is left out while another is left."""
    left_out: tuple[RefusedCandidate, ...] = ()
    """Those that are left out already."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """The report, and the log-probability of every token."""

    report: VerifyReport
    logprobs: Mapping[str, torch.Tensor]
    """`reference` and the candidates by name: fp32 [N], sequences in order."""
    data: str
    """The fingerprint of the text."""


def verify(
    reference: ReferenceModel,
    request: VerificationRequest,
    plan: DataPlan,
    *,
    batch_size: int,
    progress: Progress,
    companion: Companion | None = None,
) -> VerificationResult:
    """Compare the model with every candidate of `request` on the text of `plan`.

    `companion` is compared with the same text.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or inf, or weights cannot be replaced.
    """
    started = time.monotonic()
    measurements = MeasurementHooks(_list_scale_kinds(request), set(_list_scalable(request)))
    model, geometry = reference.model, reference.model.geometry
    text = list(batches(plan, batch_size))
    try:
        compared = score(
            model,
            list_emulations(request),
            text,
            measurements,
            progress=progress,
            stage="verifying",
            watched=None if companion is None else companion.watched,
        )
    except (ModelError, VerificationError) as error:
        rest = leave_out(request, error)
        if rest is None:
            raise
        return verify(
            reference,
            rest,
            plan,
            batch_size=batch_size,
            progress=progress,
            companion=companion,
        )
    _require_quantized(request.candidates, compared)
    fits = _measure_fits(request, measurements, geometry)
    fitted = _run_fitted(request, compared, fits, model, text, progress)
    if companion is not None:
        companion.compare(
            ComparedText(
                plan=plan,
                candidates=request.candidates,
                compared=compared,
                model=model,
                batch_size=batch_size,
                progress=progress,
            )
        )
    noise = None
    if request.measures_noise:
        few, size = choose_noise_text(plan, batch_size)
        again = score(model, (), list(batches(few, size)), progress=progress, stage="noise floor")
        noise = compare_noise(compared.reference.logprobs, again.reference.logprobs, plan, few)
    report = _build_report(
        reference,
        request,
        plan,
        _Compared(compared=compared, found=measurements.found, fits=fits, fitted=fitted),
        noise=noise,
        duration_s=time.monotonic() - started,
    )
    logprobs = {
        "reference": compared.reference.logprobs,
        **{c.name: compared.candidates[c.name].logprobs for c in request.candidates},
    }
    if companion is not None:
        gate = request.gate or GATES[request.candidates[0].default_gate]
        report, more = companion.complete(report, gate, plan)
        logprobs |= more
    return VerificationResult(report=report, logprobs=logprobs, data=plan.fingerprint)


def leave_out(
    request: VerificationRequest, error: ModelError | VerificationError
) -> VerificationRequest | None:
    """Leave out the candidate that an error is about; None if it is not known, or the last one."""
    rest = [name for name in request.opened if name != error.candidate]
    if not rest or len(rest) == len(request.opened):
        return None
    candidates = tuple(c for c in request.candidates if c.name != error.candidate)
    is_diagnosed = request.diagnosis_of != error.candidate
    refused = RefusedCandidate(name=error.candidate, why=error.message)
    return replace(
        request,
        candidates=candidates,
        opened=rest,
        left_out=(*request.left_out, refused),
        warnings=(*request.warnings, str(refused)),
        diagnosis_of=request.diagnosis_of if is_diagnosed else "",
        per_head=request.per_head if is_diagnosed else {},
    )


_NOISE_SEQUENCES, _NOISE_BATCH = 16, 4


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


def list_emulations(request: VerificationRequest) -> list[Candidate]:
    """List what runs beside the unquantized model; each has a name of its own."""
    further = {
        **request.others,
        **{_rule_key(name): candidate for name, candidate in request.rules.items()},
        **(list_decode_emulations(request.candidates) if request.scores_decoding else {}),
    }
    return [*request.candidates, *(replace(each, name=name) for name, each in further.items())]


def _rule_key(rule: str) -> str:
    return f"\0rule:{rule}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compared:
    """What was computed: scores, and how well the scales of each candidate fit."""

    compared: Scores
    found: Mapping[tuple[str, Site], torch.Tensor]
    """The sums of `MeasurementHooks`."""
    fits: Fits
    fitted: TokenScores | None
    """The scores with fitted scales; None where they were not needed."""


def _list_scale_kinds(request: VerificationRequest) -> dict[str, Mapping[Site, Quantizer]]:
    """List what is measured on K, V and q: each candidate's scales, and per-head ones."""
    if not any(candidate.fitted for candidate in request.candidates):
        return {}
    kinds = {
        candidate.name: {
            site: quantizer
            for site, quantizer in candidate.quantizers.items()
            if site in candidate.fitted and site.role is not Role.P
        }
        for candidate in request.candidates
    }
    return {**kinds, PER_HEAD: request.per_head}


def _list_scalable(request: VerificationRequest) -> Iterator[tuple[str, Site]]:
    """List the sites of each candidate where its engine uses a scale."""
    for candidate in request.candidates:
        for site, quantizer in candidate.fitted.items():
            if not isinstance(quantizer.scale, torch.Tensor):
                yield candidate.name, site


def _require_quantized(candidates: Sequence[Candidate], compared: Scores) -> None:
    """Refuse the result of an emulation that met none of the tensors it quantizes.

    Raises:
        VerificationError: naming the candidate.
    """
    for candidate in candidates:
        asked = candidate.quantizers
        if asked and not candidate.weights and not compared.damage[candidate.name]:
            raise VerificationError(
                f"{candidate.name}: nothing was quantized: the model ran, and no hook saw "
                f"{next(iter(asked))} or another site",
                hint="this class of the model is not supported: report it with its config",
            )


def _measure_fits(
    request: VerificationRequest, measurements: MeasurementHooks, geometry: ModelGeometry
) -> Fits:
    layer_of = geometry.index_modules()
    fits = {
        candidate.name: measure_fits(measurements.found, candidate.name, layer_of)
        for candidate in request.candidates
    }
    return {name: found for name, found in fits.items() if found}


def _run_fitted(
    request: VerificationRequest,
    compared: Scores,
    fits: Fits,
    model: PreparedModel | StreamedModel,
    text: Sequence[Batch],
    progress: Progress,
) -> TokenScores | None:
    """Score the model with fitted scales, where scale 1.0 loses and no candidate's scales fit.

    They tell what scale 1.0 adds to the cost of FP8. Where it loses nothing, it adds nothing; where
    the scales of a candidate fit, that candidate tells.
    """
    unscaled = next((c for c in request.candidates if c.name == SCALE_ONE), None)
    if unscaled is None or not list_losing(fits.get(SCALE_ONE, ())):
        return None
    others = [c for c in request.candidates if c.name != SCALE_ONE]
    cached = [c.name for c in others if not c.weights]
    if others and not cached:
        return None
    if (fitting := find_fitting(cached, fits)) is not None:
        return compared.candidates[fitting]
    fitted = Candidate(name=_FITTED_NAME, quantizers=unscaled.fitted)
    found = score(model, [fitted], text, progress=progress, stage=_FITTED_NAME)
    return found.candidates[_FITTED_NAME]


def _build_report(
    reference: ReferenceModel,
    request: VerificationRequest,
    plan: DataPlan,
    computed: _Compared,
    **others: Any,
) -> VerifyReport:
    """Build the report; `others` are fields of it that are measured apart."""
    compared = computed.compared
    lengths = plan.lengths
    layer_of = reference.model.geometry.index_modules()
    layers = tuple(_list_layer_rows(request.candidates, compared, layer_of))
    ppl = compute_ppl(compared.reference.logprobs)
    vocab_size = int(reference.model.model.config.get_text_config(decoder=True).vocab_size)
    broken = explain_broken(ppl, vocab_size)
    results = tuple(_make_result(c, computed, request, lengths, layers) for c in request.candidates)
    if broken:
        results = tuple(map(_withhold, results))
    pairs = _pair_candidates(results, layers, compared, lengths)
    need = _assess_need(results, layers, computed, pairs, lengths)
    basis = Basis(
        candidates=results,
        layers=layers,
        fits=computed.fits,
        kv=need,
        paired={(pair.candidate, pair.base): pair for pair in pairs},
        refused=request.refused,
        is_strict=request.is_strict,
        broken=broken,
        engine=request.engine_version,
    )
    cached = decide_kv(basis)
    if need is not None and cached is not None:
        need = need.model_copy(update={"why": cached.headline})
    if need is not None and broken:
        need = need.model_copy(update={"answer": "cannot-tell", "why": broken})
    return VerifyReport(
        model=reference.name,
        engine=request.engine or request.numerics.name,
        engine_version=request.engine_version,
        dtype=reference.dtype,
        device=reference.device,
        data=plan.sources,
        tokens=len(compared.reference.logprobs),
        sequences=len(lengths),
        seq_len=plan.seq_len,
        reference=ReferenceResult(ppl=ppl),
        candidates=results,
        refused=request.left_out,
        layers=layers,
        decision=decide(basis, cached),
        kv=need,
        comparisons=pairs,
        diagnosis=diagnose(
            computed.found,
            layer_of,
            "" if request.is_diagnosed_per_head else request.diagnosis_of,
            request.calibration_clipped,
        ),
        diagnosis_of=request.diagnosis_of,
        rules=_rank_rules(request, compared, lengths),
        decoding=compare_decoding(request.candidates, compared, lengths)
        if request.scores_decoding
        else (),
        warnings=(*request.warnings, *_list_unmet_sites(request, compared)),
        **others,
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
    compared: Scores,
    lengths: Sequence[int],
) -> tuple[PairedResult, ...]:
    """Compare each with each: KV scales and scale 1.0, and candidates with FP8 weights."""
    klds = {name: scores.klds for name, scores in compared.candidates.items()}
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
    computed: _Compared,
    pairs: Sequence[PairedResult],
    lengths: Sequence[int],
) -> KvNeed | None:
    """Answer whether KV scales are needed; None where only FP8 weights are compared."""
    others = [one for one in results if one.name != SCALE_ONE]
    is_asked = not others or any(has_kv_only(one.name, layers) for one in others)
    if SCALE_ONE not in computed.fits or not is_asked:
        return None
    klds = {SCALE_ONE: computed.compared.candidates[SCALE_ONE].klds}
    fp8, added = average(klds[SCALE_ONE], lengths), None
    if computed.fitted is not None:
        klds[_FITTED_NAME] = computed.fitted.klds
        fp8 = average(klds[_FITTED_NAME], lengths)
        added = compare_paired(SCALE_ONE, _FITTED_NAME, klds, lengths)
    scaled = {one.name for one in others}
    removed = [pair for pair in pairs if pair.candidate in scaled]
    return assess_need(list_losing(computed.fits[SCALE_ONE]), fp8, added, removed)


_FITTED_NAME = "scales that fit"


def _make_result(
    candidate: Candidate,
    computed: _Compared,
    request: VerificationRequest,
    lengths: Sequence[int],
    layers: Sequence[LayerResult],
) -> CandidateResult:
    compared = computed.compared
    scores, reference = compared.candidates[candidate.name], compared.reference
    summary = summarize(scores, reference, lengths)
    gate = request.gate or GATES[candidate.default_gate]
    verdict, why = correct_if_misleading(
        *judge(summary, gate),
        damage=describe_damage(candidate.name, layers, computed.fits),
        summary=summary,
        gate=gate,
    )
    overflowing = _find_overflow(candidate, compared)
    if overflowing:
        verdict, why = Verdict.FAIL, f"{request.numerics.name} turns {overflowing}"
    return CandidateResult(
        name=candidate.name,
        description=candidate.description,
        **list_figures(summary),
        verdict=verdict,
        verdict_why=why,
        gate=gate.name,
        by_position=summarize_positions(scores.logprobs, reference.logprobs, lengths, scores.klds),
    )


def _list_unmet_sites(request: VerificationRequest, compared: Scores) -> Iterator[str]:
    """Warn of sites that the engine quantizes and no hook sees, such as q of falcon."""
    for candidate in request.candidates:
        met = compared.damage[candidate.name]
        missed = [site for site in candidate.quantizers if site not in met]
        if missed:
            yield (
                f"{candidate.name}: {cut_list(missed, 1)}: quantized by "
                f"{request.numerics.name} but not emulated: the model computes it "
                "without a hook"
            )


def _find_overflow(candidate: Candidate, compared: Scores) -> str:
    """Describe values that overflow because the engine does not saturate; empty without any."""
    for site, sums in compared.damage[candidate.name].items():
        quantizer = candidate.quantizers.get(site)
        count = Damage(*sums.tolist()).clipped
        if quantizer is not None and not quantizer.saturates and count:
            return f"{count:.0f} values of {site} into NaN or inf; here they are saturated"
    return ""


def _list_layer_rows(
    candidates: Sequence[Candidate], compared: Scores, layer_of: Mapping[str, int]
) -> Iterator[LayerResult]:
    for candidate in candidates:
        quantizers = candidate.quantizers
        scales = {site: ScaleRange.of_quantizer(each) for site, each in quantizers.items()}
        scales |= compared.weight_scales[candidate.name]
        yield from list_layers(candidate.name, compared.damage[candidate.name], scales, layer_of)


def _rank_rules(
    request: VerificationRequest, compared: Scores, lengths: Sequence[int]
) -> tuple[RuleResult, ...]:
    """Rank the rules, the smallest divergence first."""
    scores = {rule: compared.candidates[_rule_key(rule)] for rule in request.rules}
    klds = {rule: found.klds for rule, found in scores.items()}
    found = {rule: summarize(each, compared.reference, lengths) for rule, each in scores.items()}
    ranked = sorted(found, key=lambda rule: found[rule].kld_mean or 0.0)
    return tuple(
        RuleResult(
            candidate=request.rules_of,
            rule=rule,
            ppl_ratio=found[rule].ppl_ratio,
            ppl_ratio_se=found[rule].ppl_ratio_se,
            kld_mean=found[rule].kld_mean,
            kld_se=found[rule].kld_se,
            against_best=None
            if rule == ranked[0]
            else compare_paired(rule, ranked[0], klds, lengths),
        )
        for rule in ranked
    )
