"""Verify: score a model and its FP8 candidates on the same text, and report the differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.data.sequences import Batch, DataPlan, batches, replace_sequences, take_sequences
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import ModelGeometry, Role, Site
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.histogram import lower_edge
from fp8calib.verification.damage_rows import list_layers
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.judge.decide import conclude, explain_broken, has_kv_only
from fp8calib.verification.judge.fits import (
    FITTED,
    Rows,
    assess_need,
    describe_damage,
    find_fitting,
    find_unknown_cost,
    is_measured,
    list_losing,
)
from fp8calib.verification.judge.gates import GATES, Gate, correct_if_misleading, judge
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    HistogramResult,
    LayerResult,
    NoiseResult,
    ReferenceResult,
    RefusedCandidate,
    RuleResult,
    Verdict,
    VerifyReport,
    WorstText,
)
from fp8calib.verification.score import Scores, score
from fp8calib.verification.summary import (
    average,
    compute_ppl,
    list_figures,
    summarize,
    summarize_positions,
)
from fp8calib.verification.token_scores import split_sequences

_NOISE_SEQUENCES, _NOISE_BATCH = 16, 4


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
    opened: tuple[Candidate, ...] = ()
    """Those of files and statistics."""
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""
    gate: Gate | None = None
    """None: each candidate's own."""
    is_strict: bool = False
    """Whether a warning of the gate is a failure."""
    unusable: Collection[str] = ()
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    refused: tuple[RefusedCandidate, ...] = ()
    """Those that are left out."""
    warnings: tuple[str, ...] = ()

    @property
    def batches(self) -> list[Batch]:
        """The text, in batches."""
        return list(batches(self.plan, self.batch_size))

    @property
    def measured(self) -> Candidate | None:
        """The first candidate of statistics."""
        return next((each for each in self.opened if each.stats is not None), None)

    def list_scored(self, others: Sequence[Candidate] = ()) -> list[Candidate]:
        """List what is scored together: the candidates, what runs beside them, and the rules."""
        rules = (replace(each, name=_rule_key(name)) for name, each in self.rules.items())
        return [*self.candidates, *others, *rules]

    def leave_out(self, error: ModelError | VerificationError) -> Verification:
        """Leave out the candidate of a file that an error is about, while another is left.

        Raises:
            ModelError | VerificationError: this error, if it is about none, or the last.
        """
        name, files = error.candidate, {each.name for each in self.opened}
        left = tuple(each for each in self.candidates if each.name != name)
        if name not in files or files.isdisjoint(each.name for each in left):
            raise error
        refused = RefusedCandidate(name=name, why=error.message, hint=error.hint)
        return replace(
            self,
            candidates=left,
            refused=(*self.refused, refused),
            warnings=(*self.warnings, str(refused)),
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


def run_verification(
    asked: Verification,
    model: PreparedModel | StreamedModel,
    progress: Progress,
    *,
    others: Sequence[Candidate] = (),
    watched: Sequence[torch.Tensor] | None = None,
    measures_noise: bool = False,
    shares_batch: bool = False,
) -> Verified:
    """Compare the model with every candidate, and score `others` beside them.

    Args:
        asked: the candidates and the text.
        model: the unquantized model.
        progress: hears of tokens.
        others: candidates that are no part of the report, with names of their own.
        watched: as `score` takes it.
        measures_noise: whether the unquantized model runs again, in batches of another size.
        shares_batch: as `score` takes it.

    Raises:
        CalibrationError: a forward pass failed.
        VerificationError: a model gives NaN or inf, or weights cannot be replaced.
    """
    started = time.monotonic()
    text = asked.batches
    while True:
        hooks = _make_hooks(asked.candidates)
        try:
            scores = score(
                *(model, asked.list_scored(others), text, hooks),
                progress=progress,
                stage="verifying",
                watched=watched,
                shares_batch=shares_batch,
            )
            break
        except (ModelError, VerificationError) as error:
            asked = asked.leave_out(error)
    _require_quantized(asked.candidates, scores)
    rows = {each.name: _list_layers(each, asked, scores, hooks) for each in asked.candidates}
    klds = {name: found.klds for name, found in scores.candidates.items()}
    if unknown := find_unknown_cost(asked.candidates, rows):
        scaled = Candidate(name=FITTED, quantizers=unknown)
        again = score(model, [scaled], text, progress=progress, stage=FITTED)
        klds[FITTED] = again.candidates[FITTED].klds
    noise = None
    if measures_noise:
        few, size = choose_noise_text(asked.plan, asked.batch_size)
        again = score(model, (), list(batches(few, size)), progress=progress, stage="noise floor")
        noise = compare_noise(scores.reference.logprobs, again.reference.logprobs, asked.plan, few)
    vocab_size = int(model.model.config.get_text_config(decoder=True).vocab_size)
    report = _make_report(asked, scores, klds, rows, vocab_size)
    more = {"noise": noise, "duration_s": time.monotonic() - started}
    return Verified(
        verification=asked, report=conclude(report.model_copy(update=more)), scores=scores
    )


def _make_hooks(candidates: Sequence[Candidate]) -> MeasurementHooks:
    """Measure the scales of K, V and q of each candidate, static ones beside fitted ones."""
    kinds = {
        candidate.name: {
            site: quantizer
            for site, quantizer in candidate.quantizers.items()
            if site in candidate.fitted and site.role is not Role.P
        }
        for candidate in candidates
    }
    scalable = {
        (candidate.name, site)
        for candidate in candidates
        for site, quantizer in candidate.fitted.items()
        if not isinstance(quantizer.scale, torch.Tensor)
    }
    return MeasurementHooks(kinds, scalable)


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
                f"{next(iter(asked))} or another tensor",
                hint="this class of the model is not supported: report it with its config",
            )


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


def _make_report(
    asked: Verification,
    scores: Scores,
    klds: Mapping[str, torch.Tensor],
    rows: Rows,
    vocab_size: int,
) -> VerifyReport:
    """Make the report, without its conclusion.

    `klds` are those of the candidates, and of scales that fit if they were run.
    """
    lengths, reference = asked.plan.lengths, scores.reference
    ppl = compute_ppl(reference.logprobs)
    broken = explain_broken(ppl, vocab_size)
    layers = tuple(chain.from_iterable(rows.values()))
    results = [_judge(each, asked, scores, rows[each.name], broken) for each in asked.candidates]
    # KV scales and scale 1.0 are compared with each other, and candidates with FP8 weights.
    cached = [one.name for one in results if has_kv_only(one.name, layers)]
    weights = [one.name for one in results if one.name not in cached]
    pairs = tuple(
        compare_paired(name, base, klds, lengths)
        for kind in (cached, weights)
        for name in kind
        for base in kind
        if name not in {base, SCALE_ONE}
    )
    kv = None
    if is_measured(rows.get(SCALE_ONE, ())) and (len(results) == 1 or set(cached) - {SCALE_ONE}):
        losing, added, fitting = list_losing(rows[SCALE_ONE]), None, ""
        if losing:
            fitting = FITTED if FITTED in klds else find_fitting(asked.candidates, rows)
        if fitting:
            both = {SCALE_ONE: klds[SCALE_ONE], FITTED: klds[fitting]}
            added = compare_paired(SCALE_ONE, FITTED, both, lengths)
        fp8 = average(klds[fitting or SCALE_ONE], lengths)
        kv = assess_need(losing, fp8, added, [pair for pair in pairs if pair.base == SCALE_ONE])
    return VerifyReport(
        model=asked.model,
        engine=asked.engine or asked.numerics.name,
        engine_version=asked.engine_version,
        dtype=asked.dtype,
        device=asked.device,
        data=asked.plan.sources,
        tokens=len(reference.logprobs),
        sequences=len(lengths),
        seq_len=asked.plan.seq_len,
        duration_s=0.0,
        reference=ReferenceResult(ppl=ppl),
        candidates=tuple(results),
        refused=asked.refused,
        layers=layers,
        decision=Decision(headline=""),
        kv=kv,
        comparisons=pairs,
        rules=_rank_rules(asked, scores),
        warnings=(*asked.warnings, *_list_unmet_sites(asked, scores)),
        unusable=tuple(asked.unusable),
        has_gate=asked.gate is not None,
        is_strict=asked.is_strict,
        broken=broken,
    )


def _list_layers(
    candidate: Candidate, asked: Verification, scores: Scores, hooks: MeasurementHooks
) -> list[LayerResult]:
    name, quantizers = candidate.name, candidate.quantizers
    scales = {site: ScaleRange.of_quantizer(each) for site, each in quantizers.items()}
    scales |= scores.weight_scales[name]
    layer_of = asked.geometry.index_modules()
    return list_layers(name, scores.damage[name], scales, hooks.found, layer_of)


def _judge(
    candidate: Candidate,
    asked: Verification,
    scores: Scores,
    rows: Sequence[LayerResult],
    broken: str,
) -> CandidateResult:
    name, lengths = candidate.name, asked.plan.lengths
    mine, reference = scores.candidates[name], scores.reference
    summary = summarize(mine, reference, lengths)
    gate = asked.gate or GATES[candidate.default_gate]
    verdict, why = correct_if_misleading(
        *judge(summary, gate),
        damage=describe_damage(rows),
        summary=summary,
        gate=gate,
    )
    if overflowing := _find_overflow(candidate, scores.damage[name]):
        verdict, why = Verdict.FAIL, f"{asked.numerics.name} turns {overflowing}"
    if broken and verdict is not Verdict.FAIL:  # only a failure is certain
        verdict = Verdict.CANNOT_TELL
        why = f"{why}, but the unquantized model predicts no better than chance"
    return CandidateResult(
        name=name,
        description=candidate.description,
        **list_figures(summary),
        verdict=verdict,
        verdict_why=why,
        gate=gate.name,
        by_position=summarize_positions(mine.logprobs, reference.logprobs, lengths, mine.klds),
    )


def _find_overflow(candidate: Candidate, damage: Mapping[Site, torch.Tensor]) -> str:
    """Describe values that overflow because the engine does not saturate; empty without any."""
    for site, sums in damage.items():
        quantizer, count = candidate.quantizers.get(site), Damage(*sums.tolist()).clipped
        if quantizer is not None and not quantizer.saturates and count:
            return f"{count:.0f} values of {site} into NaN or inf; here they are saturated"
    return ""


def _list_unmet_sites(asked: Verification, scores: Scores) -> Iterator[str]:
    """Warn of sites that the engine quantizes and no hook sees, such as q of falcon."""
    for candidate in asked.candidates:
        met = scores.damage[candidate.name]
        if missed := [site for site in candidate.quantizers if site not in met]:
            yield (
                f"{candidate.name}: {cut_list(missed, 1)}: quantized by {asked.numerics.name} but "
                "not emulated: the model computes it without a hook"
            )


def _rank_rules(asked: Verification, scores: Scores) -> tuple[RuleResult, ...]:
    """Rank the rules, the smallest divergence first."""
    lengths = asked.plan.lengths
    mine = {rule: scores.candidates[_rule_key(rule)] for rule in asked.rules}
    klds = {rule: each.klds for rule, each in mine.items()}
    found = {rule: summarize(each, scores.reference, lengths) for rule, each in mine.items()}
    ranked = sorted(found, key=lambda rule: found[rule].kld_mean or 0.0)
    return tuple(
        RuleResult(
            candidate="" if asked.measured is None else asked.measured.name,
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


def _rule_key(rule: str) -> str:
    return f"\0rule:{rule}"


_MOST_TEXTS, _TOKENS_BEFORE = 5, 24


def list_shown_on_page(verified: Verified, decode: Callable[[list[int]], str]) -> dict[str, object]:
    """List the fields of a report that the page alone shows.

    The texts that lose most are quoted for the candidate that the decision is about.
    """
    asked, report = verified.verification, verified.report
    klds = {
        each.name: list(
            split_sequences(verified.scores.candidates[each.name].klds, asked.plan.lengths)
        )
        for each in asked.candidates
    }
    means = {
        name: tuple(float(each.double().mean()) for each in parts) for name, parts in klds.items()
    }
    name = report.decision.candidate or report.candidates[0].name
    return {
        "histograms": tuple(_list_histograms(asked)),
        "sequence_klds": means,
        "worst_texts": tuple(_quote_texts(name, klds[name], means[name], asked.plan, decode)),
    }


def _list_histograms(asked: Verification) -> Iterator[HistogramResult]:
    """List what the first statistics saw at the sites that its candidate scales statically."""
    measured = asked.measured
    made = (each for each in asked.candidates if measured and each.name == measured.name)
    candidate = next(made, None)
    if measured is None or measured.stats is None or candidate is None:
        return
    layer_of = asked.geometry.index_modules()
    for site, quantizer in candidate.quantizers.items():
        seen = measured.stats.sites.get(site)
        if seen is None or seen.histogram is None or not isinstance(quantizer.scale, torch.Tensor):
            continue
        filled = seen.histogram[1:].nonzero().flatten() + 1
        if not len(filled):
            continue
        scale, fmt = float(quantizer.scale.max()), quantizer.fmt
        bins = range(int(filled[0]), int(filled[-1]) + 1)
        yield HistogramResult(
            site=str(site),
            layer=layer_of[site.module],
            lower_edges_log2=tuple(math.log2(lower_edge(index)) for index in bins),
            counts=tuple(seen.histogram[bins.start : bins.stop].tolist()),
            scale=scale,
            largest=scale * fmt.max,
            smallest=scale * fmt.smallest_subnormal / 2,
        )


def _quote_texts(
    name: str,
    klds: Sequence[torch.Tensor],
    means: Sequence[float],
    plan: DataPlan,
    decode: Callable[[list[int]], str],
) -> Iterator[WorstText]:
    text = list(batches(plan, 1))
    for index in sorted(range(len(klds)), key=lambda index: -means[index])[:_MOST_TEXTS]:
        if not means[index] > 0:
            return
        worst = int(klds[index].argmax())
        at = int(text[index].scored[0][worst]) + 1
        ids = plan.sequences[index][max(at - _TOKENS_BEFORE, 0) : at + 1].tolist()
        yield WorstText(
            candidate=name,
            sequence=index + 1,
            kld=means[index],
            before=f"{'... ' * (at > _TOKENS_BEFORE)}{decode(ids[:-1])}",
            worst=decode(ids[-1:]),
            worst_kld=float(klds[index][worst]),
        )
