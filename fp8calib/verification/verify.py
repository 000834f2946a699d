"""Verify: score a model and its FP8 candidates on the same text, and report the differences."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.data.sequences import Batch, DataPlan, batches, replace_sequences, take_sequences
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.shapes import ModelGeometry, Role
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.histogram import lower_edge
from fp8calib.verification.candidates import OpenedCandidate
from fp8calib.verification.damage_rows import PER_HEAD, diagnose, list_layers, measure_fits
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.emulate import MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.emulation.kv import emulate_kv
from fp8calib.verification.judge.decide import conclude, explain_broken, has_kv_only
from fp8calib.verification.judge.fits import (
    Fits,
    assess_need,
    describe_damage,
    list_losing,
)
from fp8calib.verification.judge.gates import GATES, Gate, correct_if_misleading, judge
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    Decision,
    HistogramResult,
    KvNeed,
    LayerResult,
    NoiseResult,
    PairedResult,
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
from fp8calib.verification.token_scores import TokenScores, split_sequences

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
    opened: tuple[OpenedCandidate, ...] = ()
    """What the candidates of files were made from."""
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""
    diagnosis_of: str = ""
    """The candidate whose scales the diagnosis compares with 1.0; empty without one."""
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
    def measured(self) -> OpenedCandidate | None:
        """The first candidate of statistics."""
        return next((each for each in self.opened if each.stats is not None), None)

    @property
    def diagnosed(self) -> OpenedCandidate | None:
        """What `diagnosis_of` was made from."""
        return next((each for each in self.opened if each.name == self.diagnosis_of), None)

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
            diagnosis_of="" if self.diagnosis_of == name else self.diagnosis_of,
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
        hooks = _make_hooks(asked)
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
    fits = {each.name: measure_fits(hooks.found, each.name, layer_of) for each in asked.candidates}
    maker = _ReportMaker(asked, scores, {name: found for name, found in fits.items() if found})
    fitted = None
    if maker.needs_fitted:
        unscaled = next(each for each in asked.candidates if each.name == SCALE_ONE)
        scaled = Candidate(name=_FITTED_NAME, quantizers=unscaled.fitted)
        again = score(model, [scaled], text, progress=progress, stage=_FITTED_NAME)
        fitted = again.candidates[_FITTED_NAME]
    noise = None
    if measures_noise:
        few, size = choose_noise_text(asked.plan, asked.batch_size)
        again = score(model, (), list(batches(few, size)), progress=progress, stage="noise floor")
        noise = compare_noise(scores.reference.logprobs, again.reference.logprobs, asked.plan, few)
    diagnosed, measured = asked.diagnosed, asked.measured
    is_per_head = bool(diagnosed and diagnosed.found and diagnosed.found.table.per_head)
    report = maker.make(
        fitted,
        vocab_size=int(model.model.config.get_text_config(decoder=True).vocab_size),
        noise=noise,
        diagnosis=tuple(
            diagnose(
                *(hooks.found, fits.get(SCALE_ONE, ())),
                "" if is_per_head else asked.diagnosis_of,
                measured.stats if measured else None,
                asked.fmt,
            )
        ),
        duration_s=time.monotonic() - started,
    )
    return Verified(verification=asked, report=conclude(report), scores=scores)


def _make_hooks(asked: Verification) -> MeasurementHooks:
    """Measure each candidate's scales of K, V and q, and per-head ones, beside fitted ones."""
    kinds = {
        candidate.name: {
            site: quantizer
            for site, quantizer in candidate.quantizers.items()
            if site in candidate.fitted and site.role is not Role.P
        }
        for candidate in asked.candidates
    }
    scalable = {
        (candidate.name, site)
        for candidate in asked.candidates
        for site, quantizer in candidate.fitted.items()
        if not isinstance(quantizer.scale, torch.Tensor)
    }
    kinds[PER_HEAD] = {}
    if (diagnosed := asked.diagnosed) is not None and asked.numerics.kv_per_head:
        table, own = diagnosed.make_table(asked.fmt, per_head=True), kinds[diagnosed.name]
        if table.per_head:
            scaled = emulate_kv(table, asked.numerics).items()
            kinds[PER_HEAD] = {site: each for site, each in scaled if site in own}
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


class _ReportMaker:
    """Makes the report of scores, without its conclusion."""

    def __init__(self, asked: Verification, scores: Scores, fits: Fits) -> None:
        self._asked, self._scores, self._fits = asked, scores, fits
        self._lengths = asked.plan.lengths
        self._layers = tuple(self._list_layers())
        self._klds = {name: each.klds for name, each in scores.candidates.items()}
        others = [each for each in asked.candidates if each.name != SCALE_ONE]
        cached = [each.name for each in others if not each.weights]
        is_asked = bool(cached) or not others
        self._is_lossy = is_asked and bool(list_losing(fits.get(SCALE_ONE, ())))
        # Scales that fit tell what scale 1.0 adds to the cost of FP8. Where it loses nothing, it
        # adds nothing; where the scales of a candidate fit, that candidate tells.
        fitting = (name for name in cached if name in fits and not list_losing(fits[name]))
        self._fitting = next(fitting, None)
        self.needs_fitted = self._is_lossy and self._fitting is None

    def make(self, fitted: TokenScores | None, *, vocab_size: int, **more: Any) -> VerifyReport:
        """Make the report; `fitted` are the scores with scales that fit, if these are needed."""
        asked, reference = self._asked, self._scores.reference
        ppl = compute_ppl(reference.logprobs)
        broken = explain_broken(ppl, vocab_size)
        results = [self._judge(each, broken) for each in asked.candidates]
        pairs = self._pair_candidates(results)
        return VerifyReport(
            model=asked.model,
            engine=asked.engine or asked.numerics.name,
            engine_version=asked.engine_version,
            dtype=asked.dtype,
            device=asked.device,
            data=asked.plan.sources,
            tokens=len(reference.logprobs),
            sequences=len(self._lengths),
            seq_len=asked.plan.seq_len,
            reference=ReferenceResult(ppl=ppl),
            candidates=tuple(results),
            refused=asked.refused,
            layers=self._layers,
            decision=Decision(headline=""),
            kv=self._assess_need(results, fitted, pairs),
            comparisons=pairs,
            diagnosis_of=asked.diagnosis_of,
            rules=self._rank_rules(),
            warnings=(*asked.warnings, *self._list_unmet_sites()),
            fits=self._fits,
            unusable=tuple(asked.unusable),
            has_gate=asked.gate is not None,
            is_strict=asked.is_strict,
            broken=broken,
            **more,
        )

    def _list_layers(self) -> Iterator[LayerResult]:
        layer_of = self._asked.geometry.index_modules()
        for candidate in self._asked.candidates:
            name, quantizers = candidate.name, candidate.quantizers
            scales = {site: ScaleRange.of_quantizer(each) for site, each in quantizers.items()}
            scales |= self._scores.weight_scales[name]
            yield from list_layers(name, self._scores.damage[name], scales, layer_of)

    def _judge(self, candidate: Candidate, broken: str) -> CandidateResult:
        name, asked, lengths = candidate.name, self._asked, self._lengths
        mine, reference = self._scores.candidates[name], self._scores.reference
        summary = summarize(mine, reference, lengths)
        gate = asked.gate or GATES[candidate.default_gate]
        damage = describe_damage(name, self._layers, self._fits)
        verdict, why = judge(summary, gate)
        verdict, why = correct_if_misleading(
            *(verdict, why), damage=damage, summary=summary, gate=gate
        )
        if overflowing := self._find_overflow(candidate):
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

    def _find_overflow(self, candidate: Candidate) -> str:
        """Describe values that overflow because the engine does not saturate; empty without any."""
        for site, sums in self._scores.damage[candidate.name].items():
            quantizer = candidate.quantizers.get(site)
            count = Damage(*sums.tolist()).clipped
            if quantizer is not None and not quantizer.saturates and count:
                return f"{count:.0f} values of {site} into NaN or inf; here they are saturated"
        return ""

    def _pair_candidates(self, results: Sequence[CandidateResult]) -> tuple[PairedResult, ...]:
        """Compare each with each: KV scales and scale 1.0, and candidates with FP8 weights."""
        cached = [one for one in results if has_kv_only(one.name, self._layers)]
        weights = [one for one in results if one not in cached]
        return tuple(
            compare_paired(one.name, base.name, self._klds, self._lengths)
            for kind in (cached, weights)
            for one in kind
            for base in kind
            if one is not base and one.name != SCALE_ONE
        )

    def _assess_need(
        self,
        results: Sequence[CandidateResult],
        fitted: TokenScores | None,
        pairs: Sequence[PairedResult],
    ) -> KvNeed | None:
        """Answer whether KV scales are needed; None where only FP8 weights are compared."""
        others = [one.name for one in results if one.name != SCALE_ONE]
        is_asked = not others or any(has_kv_only(name, self._layers) for name in others)
        if SCALE_ONE not in self._fits or not is_asked:
            return None
        klds, fp8, added = self._klds, self._klds[SCALE_ONE], None
        if self._is_lossy and self._fitting is not None:
            fitted = self._scores.candidates[self._fitting]
        if fitted is not None:
            fp8 = fitted.klds
            pair = {SCALE_ONE: klds[SCALE_ONE], _FITTED_NAME: fp8}
            added = compare_paired(SCALE_ONE, _FITTED_NAME, pair, self._lengths)
        removed = [pair for pair in pairs if pair.base == SCALE_ONE]
        losing = list_losing(self._fits[SCALE_ONE])
        return assess_need(losing, average(fp8, self._lengths), added, removed)

    def _list_unmet_sites(self) -> Iterator[str]:
        """Warn of sites that the engine quantizes and no hook sees, such as q of falcon."""
        for candidate in self._asked.candidates:
            met = self._scores.damage[candidate.name]
            if missed := [site for site in candidate.quantizers if site not in met]:
                yield (
                    f"{candidate.name}: {cut_list(missed, 1)}: quantized by "
                    f"{self._asked.numerics.name} but not emulated: the model computes it without "
                    "a hook"
                )

    def _rank_rules(self) -> tuple[RuleResult, ...]:
        """Rank the rules, the smallest divergence first."""
        measured = self._asked.measured
        mine = {rule: self._scores.candidates[_rule_key(rule)] for rule in self._asked.rules}
        klds = {rule: each.klds for rule, each in mine.items()}
        found = {
            rule: summarize(each, self._scores.reference, self._lengths)
            for rule, each in mine.items()
        }
        ranked = sorted(found, key=lambda rule: found[rule].kld_mean or 0.0)
        return tuple(
            RuleResult(
                candidate="" if measured is None else measured.name,
                rule=rule,
                ppl_ratio=found[rule].ppl_ratio,
                ppl_ratio_se=found[rule].ppl_ratio_se,
                kld_mean=found[rule].kld_mean or 0.0,
                kld_se=found[rule].kld_se,
                against_best=None
                if rule == ranked[0]
                else compare_paired(rule, ranked[0], klds, self._lengths),
            )
            for rule in ranked
        )


def _rule_key(rule: str) -> str:
    return f"\0rule:{rule}"


def list_histograms(asked: Verification) -> Iterator[HistogramResult]:
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


_MOST_TEXTS, _TOKENS_BEFORE = 5, 24


def list_sequence_klds(verified: Verified) -> dict[str, tuple[float, ...]]:
    """Give the mean divergence of each sequence, by candidate."""
    asked = verified.verification
    return {
        each.name: tuple(
            float(klds.double().mean())
            for klds in split_sequences(
                verified.scores.candidates[each.name].klds, asked.plan.lengths
            )
        )
        for each in asked.candidates
    }


def quote_worst_texts(verified: Verified, decode: Callable[[list[int]], str]) -> list[WorstText]:
    """Quote the texts that lose most with the candidate that the decision is about."""
    report, plan = verified.report, verified.verification.plan
    name = report.decision.candidate or report.candidates[0].name
    klds = list(split_sequences(verified.scores.candidates[name].klds, plan.lengths))
    ranked = sorted(range(len(klds)), key=lambda index: -float(klds[index].double().mean()))
    text = list(batches(plan, 1))
    quoted = []
    for index in ranked[:_MOST_TEXTS]:
        worst = int(klds[index].argmax())
        at = int(text[index].scored[0][worst]) + 1
        ids = plan.sequences[index][max(at - _TOKENS_BEFORE, 0) : at + 1].tolist()
        cut = "... " * (at > _TOKENS_BEFORE)
        quoted.append(
            WorstText(
                candidate=name,
                sequence=index + 1,
                kld=float(klds[index].double().mean()),
                before=f"{cut}{decode(ids[:-1])}",
                worst=decode(ids[-1:]),
                worst_kld=float(klds[index][worst]),
            )
        )
    return [each for each in quoted if each.kld > 0]
