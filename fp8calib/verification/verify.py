"""Verify: run a model and its FP8 emulations on the same text, and report the differences."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fp8calib.calibration import Progress
from fp8calib.data.plan import DataPlan, batches
from fp8calib.engines.numerics import Numerics
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Site
from fp8calib.model.load import LoadedModel
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.compare.comparison import (
    Comparison,
    ComparisonResult,
    advance_by_share,
)
from fp8calib.verification.compare.summary import (
    compute_ppl,
    divergence_errors,
    list_figures,
    summarize,
    summarize_positions,
)
from fp8calib.verification.compare.whole import WholeComparison
from fp8calib.verification.damage_rows import diagnose, index_layers, list_layers
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.emulate import Emulation, MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Quantizer, find_ranges
from fp8calib.verification.emulation.weights import ParameterReader
from fp8calib.verification.judge.advice import advise
from fp8calib.verification.judge.gates import GATES, Gate, downgrade_if_misleading, judge
from fp8calib.verification.report import (
    SCALE_ONE,
    SERVER,
    CandidateResult,
    HistogramResult,
    LayerResult,
    ReferenceResult,
    RuleResult,
    Sensitivity,
    Verdict,
    VerifyReport,
)
from fp8calib.verification.sensitivity import measure_sensitivity
from fp8calib.verification.server.assess import Evidence, ServerAnswers, assess
from fp8calib.verification.server.faults import FaultRunner, changes_of
from fp8calib.verification.server.hypotheses import EmulatedFault, Fault
from fp8calib.verification.server.row import add_server


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceModel:
    """The unquantized model that candidates are compared with."""

    name: str
    model: LoadedModel
    geometry: ModelGeometry
    originals: ParameterReader
    dtype: str
    device: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationRequest:
    """The candidates to compare with a model, and the settings of the report."""

    numerics: Numerics
    """How the engine computes."""
    candidates: tuple[Candidate, ...]
    """In the order of the report."""
    engine_version: str = ""
    rules: Mapping[str, Candidate] = field(default_factory=dict)
    """Scale rules to rank, by name; all from the same statistics."""
    rules_of: str = ""
    """The candidate that the rules are applied to."""
    scale_kinds: Mapping[str, Mapping[Site, Quantizer]] = field(default_factory=dict)
    """Kinds of KV scales (1.0, per tensor, per head) that the diagnosis compares."""
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis uses; empty without one."""
    calibration_clipped: Mapping[Site, float] = field(default_factory=dict)
    """Share of K and V that clips at scale 1.0, by the statistics' histograms."""
    gate: Gate | None = None
    """None: each candidate's own."""
    faults: Mapping[str, EmulatedFault] = field(default_factory=dict)
    """Faults of all layers that a server may have, by name; they run beside the candidates."""
    stores_faults: bool = False
    """Whether faults, those of layers too, are part of the result."""
    sensitivity_of: Candidate | None = None
    histograms: tuple[HistogramResult, ...] = ()
    refused: Collection[str] = ()
    """The candidates that the engine cannot load."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationResult:
    """The report, and the log-probability of every token."""

    report: VerifyReport
    logprobs: Mapping[str, torch.Tensor]
    """`reference` and the candidates by name: fp32 [N], sequences in order."""
    data: str
    """The fingerprint of the text."""
    faults: Mapping[str, Fault] = field(default_factory=dict)
    """Those of `logprobs` that are faults; those of K, V and layers for the first tokens alone."""


def verify(
    reference: ReferenceModel,
    request: VerificationRequest,
    plan: DataPlan,
    *,
    batch_size: int,
    progress: Progress,
    comparison: Comparison | None = None,
    server: ServerAnswers | None = None,
) -> VerificationResult:
    """Compare the model with every candidate of `request` on the text of `plan`.

    `comparison` runs the models; None takes one that holds the model in memory whole. `server` is
    what a running server answered about the text.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or inf, or weights cannot be replaced.
    """
    started = time.monotonic()
    measurements = MeasurementHooks(request.scale_kinds)
    if comparison is None:
        comparison = WholeComparison(reference.model, reference.geometry, reference.originals)
    emulations = list_emulations(request)
    layers = comparison.num_layers
    tokens = plan.num_tokens * max(layers, 1)
    cuts = 0 if layers else sum(1 for _ in batches(plan, batch_size))
    progress.stage("verifying", tokens, unit="tokens", layers=layers, batches=cuts)
    compared = comparison.run(
        batches(plan, batch_size),
        emulations,
        reference_hooks=measurements,
        watched=None if server is None else server.watched,
        advance=advance_by_share(len(emulations) + 1, progress.advance),
    )
    runner = FaultRunner(
        comparison=comparison,
        geometry=reference.geometry,
        candidates=request.candidates,
        plan=plan,
        batch_size=batch_size,
    )
    assessment = None
    if server is not None:
        assessment = assess(server, _gather(request, compared, runner), progress)
    sensitivity = None
    if request.sensitivity_of is not None:
        sensitivity = measure_sensitivity(
            comparison,
            reference.geometry,
            request.sensitivity_of,
            plan,
            request.numerics,
            batch_size=batch_size,
            progress=progress,
        )
    report = _build_report(
        reference, request, plan, compared, measurements, sensitivity, time.monotonic() - started
    )
    logprobs = {
        "reference": compared.reference.logprobs,
        **{c.name: compared.candidates[c.name].logprobs for c in request.candidates},
    }
    if assessment is not None:
        gate = request.gate or GATES[request.candidates[0].default_gate]
        report = add_server(report, assessment, gate, plan)
        logprobs[SERVER] = assessment.logprobs
    faults: dict[str, Fault] = {}
    if request.stores_faults:
        logprobs |= {name: compared.candidates[name].logprobs for name in request.faults}
        effects = {n: e for base in runner.bases for n, e in runner.run(base, progress).items()}
        first = compared.reference.logprobs[: runner.num_tokens]
        logprobs |= {name: (first + one.changes).float() for name, one in effects.items()}
        faults = {**request.faults, **effects}
    return VerificationResult(
        report=report, logprobs=logprobs, data=plan.fingerprint, faults=faults
    )


def _gather(
    request: VerificationRequest, compared: ComparisonResult, runner: FaultRunner
) -> Evidence:
    """Gather what a server is compared with."""
    names = [*(candidate.name for candidate in request.candidates), *request.faults]
    return Evidence(
        sequences=runner.plan.sequences,
        reference=compared.reference.logprobs,
        watched=compared.reference.watched,
        candidates={name: changes_of(compared, name) for name in names},
        has_scales=bool(runner.bases),
        faults=request.faults,
        layer_faults=runner,
    )


def list_emulations(request: VerificationRequest) -> dict[str, Emulation]:
    """List the emulations that run beside the unquantized model, by name."""
    candidates = {candidate.name: candidate.emulation for candidate in request.candidates}
    faults = {name: fault.emulation for name, fault in request.faults.items()}
    rules = {_rule_key(name): c.emulation for name, c in request.rules.items()}
    return candidates | faults | rules


def _rule_key(rule: str) -> str:
    return f"\0rule:{rule}"


def _build_report(
    reference: ReferenceModel,
    request: VerificationRequest,
    plan: DataPlan,
    compared: ComparisonResult,
    measurements: MeasurementHooks,
    sensitivity: Sensitivity | None,
    duration_s: float,
) -> VerifyReport:
    lengths = [len(sequence) for sequence in plan.sequences]
    layer_of = index_layers(reference.geometry)
    layers = tuple(_list_layer_rows(request.candidates, compared, layer_of))
    results = tuple(_make_result(c, compared, request, lengths, layers) for c in request.candidates)
    errors = divergence_errors(compared.candidates, SCALE_ONE, lengths)
    advice = advise(results, layers, errors, request.refused)
    return VerifyReport(
        model=reference.name,
        engine=request.numerics.name,
        engine_version=request.engine_version,
        dtype=reference.dtype,
        device=reference.device,
        data=plan.sources,
        tokens=len(compared.reference.logprobs),
        sequences=len(lengths),
        seq_len=plan.seq_len,
        duration_s=duration_s,
        reference=ReferenceResult(ppl=compute_ppl(compared.reference)),
        candidates=results,
        layers=layers,
        advice=advice.text,
        conclusion=advice.conclusion,
        remedy=advice.remedy,
        remedy_for=advice.candidate,
        diagnosis=diagnose(measurements.found, layer_of, request.calibration_clipped),
        diagnosis_of=request.diagnosis_of,
        histograms=request.histograms,
        sensitivity=sensitivity,
        rules=_rank_rules(request, compared, lengths),
        warnings=(*request.warnings, *_list_unmet_sites(request, compared)),
    )


def _make_result(
    candidate: Candidate,
    compared: ComparisonResult,
    request: VerificationRequest,
    lengths: Sequence[int],
    layers: Sequence[LayerResult],
) -> CandidateResult:
    scores, reference = compared.candidates[candidate.name], compared.reference
    summary = summarize(scores, reference, lengths)
    gate = request.gate or GATES[candidate.default_gate]
    verdict, why = downgrade_if_misleading(
        *judge(summary, gate),
        candidate=candidate.name,
        kld_mean=summary.kld_mean,
        rows=layers,
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
        by_position=summarize_positions(scores, reference, lengths),
    )


def _list_unmet_sites(request: VerificationRequest, compared: ComparisonResult) -> Iterator[str]:
    """Warn of sites that the engine quantizes and no hook sees, such as q of falcon."""
    for candidate in request.candidates:
        met = compared.damage[candidate.name]
        missed = [site for site in candidate.emulation.quantizers if site not in met]
        if missed:
            more = f" and {len(missed) - 1} more" if missed[1:] else ""
            yield (
                f"{candidate.name}: {missed[0]}{more}: quantized by {request.numerics.name} but "
                "not emulated: the model computes it without a hook"
            )


def _find_overflow(candidate: Candidate, compared: ComparisonResult) -> str:
    """Describe values that overflow because the engine does not saturate; empty without any."""
    for site, sums in compared.damage[candidate.name].items():
        quantizer = candidate.emulation.quantizers.get(site)
        count = Damage(*sums.tolist()).clipped
        if quantizer is not None and not quantizer.saturates and count:
            return f"{count:.0f} values of {site} into NaN or inf; here they are saturated"
    return ""


def _list_layer_rows(
    candidates: Sequence[Candidate], compared: ComparisonResult, layer_of: Mapping[str, int]
) -> Iterator[LayerResult]:
    for candidate in candidates:
        scales = find_ranges(candidate.emulation.quantizers)
        scales |= compared.weight_scales[candidate.name]
        yield from list_layers(candidate.name, compared.damage[candidate.name], scales, layer_of)


def _rank_rules(
    request: VerificationRequest, compared: ComparisonResult, lengths: Sequence[int]
) -> tuple[RuleResult, ...]:
    results = []
    for rule in request.rules:
        summary = summarize(compared.candidates[_rule_key(rule)], compared.reference, lengths)
        results.append(
            RuleResult(
                candidate=request.rules_of,
                rule=rule,
                ppl_ratio=summary.ppl_ratio,
                ppl_ratio_se=summary.ppl_ratio_se,
                kld_mean=summary.kld_mean,
            )
        )
    return tuple(sorted(results, key=lambda result: result.kld_mean))
