"""Verify: score a model and its FP8 candidates on the same text, and report the differences."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fp8calib.calibration.job import RunModel
from fp8calib.calibration.memory_plan import (
    MemoryPlan,
    Workload,
    find_limits,
    plan_memory,
    whole_bytes,
)
from fp8calib.calibration.progress import Progress
from fp8calib.data.sequences import Batch, DataPlan, batches, take_sequences
from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.engine import Engine
from fp8calib.errors import ModelError, VerificationError, cut_list
from fp8calib.model.device import DTYPES
from fp8calib.model.geometry import Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.numerics.schemes import Granularity
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.emulate import EmulationHooks, MeasurementHooks
from fp8calib.verification.emulation.fake_quantize import Damage
from fp8calib.verification.emulation.probabilities import attending_bytes
from fp8calib.verification.emulation.shared_batch import can_share, repeat
from fp8calib.verification.judge.decide import conclude, explain_broken, has_kv_only
from fp8calib.verification.judge.fits import assess_need, describe_damage, list_losing
from fp8calib.verification.judge.gates import GATES, Gate, judge
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
    compare_paired,
    compute_ppl,
    summarize,
    summarize_positions,
)
from fp8calib.verification.token_scores import scoring_bytes, split_sequences

if TYPE_CHECKING:
    from fp8calib.calibration.streamed_model import StreamedModel

_NOISE_SEQUENCES, _NOISE_BATCH = 16, 4
_FITTED = "scales that fit"
"""Names the divergences of a KV cache whose scales fit every tensor."""
_RULE = "\0rule:"
"""Begins the name under which a rule is scored."""
_MOST_DB = 200.0
"""Stands for a loss where the fitted scale loses nothing at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verification:
    """What is compared with an unquantized model, on which text; made before a weight is read."""

    model: RunModel
    fingerprint: str = ""
    """Hash of its config and weights (`fingerprint_model`)."""
    engine: Engine
    numerics: Numerics
    """How the engine computes."""
    candidates: tuple[Candidate, ...]
    """In the order of the report."""
    plan: DataPlan
    batch_size: int = 1
    rules: Mapping[str, Candidate] = field(default_factory=dict)
    """Scale rules to rank, by name; all from the same statistics."""
    others: tuple[Candidate, ...] = ()
    """Scored beside the candidates, under other names; not in the report."""
    watched: Sequence[torch.Tensor] | None = None
    """Passed to `score`, as is the next."""
    shares_batch: bool = False
    opened: tuple[Candidate, ...] = ()
    """Candidates that were opened: files and statistics."""
    gate: Gate | None = None
    """None: each candidate has its own."""
    is_strict: bool = False
    """Whether a warning of the gate is a failure."""
    unusable: Collection[str] = ()
    """The candidates that the engine cannot load, or whose KV scales it does not use."""
    refused: tuple[RefusedCandidate, ...] = ()
    """Candidates that are left out, with the reason."""
    warnings: tuple[str, ...] = ()


def run_verification(
    asked: Verification, model: PreparedModel | StreamedModel, progress: Progress
) -> tuple[Verification, VerifyReport, Scores]:
    """Compare the unquantized model with every candidate; `progress` hears of tokens.

    Returns:
        What was asked, without the candidates that failed; the report; what it is made from.
    """
    started, text = time.monotonic(), list(batches(asked.plan, asked.batch_size))
    rules = [replace(each, name=_RULE + name) for name, each in asked.rules.items()]
    while True:
        hooks = MeasurementHooks(asked.candidates)
        try:
            scores = score(
                *(model, [*asked.candidates, *asked.others, *rules], text, hooks),
                progress=progress,
                stage="verifying",
                watched=asked.watched,
                shares_batch=asked.shares_batch,
            )
            break
        except (ModelError, VerificationError) as error:  # the rest is compared without it
            name, files = error.candidate, {each.name for each in asked.opened}
            left = tuple(each for each in asked.candidates if each.name != name)
            if name not in files or files.isdisjoint(each.name for each in left):
                raise  # it is about none, or the last
            refused = RefusedCandidate(name=name, why=error.message, hint=error.hint)
            asked = replace(
                asked,
                candidates=left,
                refused=(*asked.refused, refused),
                warnings=(*asked.warnings, str(refused)),
            )
    layer_of, rows = asked.model.prepared.geometry.index_modules(), {}
    vocab_size = int(model.model.config.get_text_config(decoder=True).vocab_size)
    ppl = compute_ppl(scores.reference.logprobs)
    broken = explain_broken(ppl, vocab_size)
    unmet: list[str] = []
    results = []
    for each in asked.candidates:
        unmet += _list_unmet_sites(each, asked, scores)
        rows[each.name] = list_layers(scores.hooks[each.name], hooks.found, layer_of)
        results.append(_judge(each, asked, scores, rows[each.name], broken))
    layers = tuple(chain.from_iterable(rows.values()))

    # KV scales and scale 1.0 are compared with each other, and candidates with FP8 weights.
    cached = [one.name for one in results if has_kv_only(one.name, layers)]
    klds = {name: found.klds for name, found in scores.candidates.items()}
    pairs = tuple(
        compare_paired(name, base, klds, asked.plan.lengths)
        for kind in (cached, [one.name for one in results if one.name not in cached])
        for name in kind
        for base in kind
        if name not in {base, SCALE_ONE}
    )
    rescore, kv = partial(score, model, progress=progress), None
    has_fits = any(row.loss_db is not None for row in rows.get(SCALE_ONE, ()))
    if has_fits and (len(results) == 1 or len(cached) > 1):
        kv = _assess(asked, rows, klds, pairs, partial(rescore, batches=text))
    noise = measure_noise(
        *(asked.plan, asked.batch_size, scores.reference.logprobs),
        lambda text: rescore((), text, stage="noise floor").reference.logprobs,
    )
    report = VerifyReport(
        model=asked.model.name,
        engine=asked.engine.key,
        engine_version=asked.engine.release,
        dtype=asked.model.dtype,
        device=asked.model.device,
        data=asked.plan.sources,
        tokens=len(scores.reference.logprobs),
        sequences=len(asked.plan.lengths),
        seq_len=asked.plan.seq_len,
        duration_s=time.monotonic() - started,
        reference=ReferenceResult(ppl=ppl),
        candidates=tuple(results),
        refused=asked.refused,
        layers=layers,
        decision=Decision(headline=""),
        kv=kv,
        noise=noise,
        comparisons=pairs,
        rules=_rank_rules(asked, scores) if asked.rules else (),
        warnings=(*asked.warnings, *unmet),
        unusable=tuple(asked.unusable),
        has_gate=asked.gate is not None,
        is_strict=asked.is_strict,
        broken=broken,
    )
    return asked, conclude(report), scores


def _list_unmet_sites(candidate: Candidate, asked: Verification, scores: Scores) -> Iterator[str]:
    """Warn of sites that the engine quantizes and no hook sees, such as q of falcon.

    It is an error if no hook saw any, and no weights are quantized.
    """
    met = scores.hooks[candidate.name].damage
    missed = [site for site in candidate.quantizers if site not in met]
    if missed and not met and not candidate.weights:
        raise VerificationError(
            f"{candidate.name}: nothing was quantized: the model ran, and no hook saw {missed[0]} "
            "or another tensor",
            hint="this class of the model is not supported: report it with its config",
        )
    if missed:
        yield (
            f"{candidate.name}: {cut_list(missed, 1)}: quantized by {asked.numerics.name} but "
            "not emulated: the model computes it without a hook"
        )


def list_layers(
    hooks: EmulationHooks,
    fits: Mapping[tuple[str, Site], torch.Tensor],
    layer_of: Mapping[str, int],
) -> list[LayerResult]:
    """Make the rows of a candidate by its hooks, the most damaged site first.

    `fits` are those of `MeasurementHooks.found`.
    """
    rows, candidate, weight_scales = [], hooks.candidate, hooks.weight_scales
    for site, sums in hooks.damage.items():
        found, measured = Damage(*sums.tolist()), fits.get((candidate.name, site))
        clipped, flushed = found.shares
        per: Granularity | Literal["head"]
        smallest = largest = limit = None
        if site in weight_scales:
            per, smallest, largest = weight_scales[site]
        elif isinstance(scale := (quantizer := candidate.quantizers[site]).scale, Granularity):
            per = scale  # computed at run time
        else:  # one, or one per head
            smallest, largest = float(scale.min()), float(scale.max())
            per = Granularity.TENSOR if scale.numel() == 1 else "head"
            limit = largest * quantizer.fmt.max
        rows.append(
            LayerResult(
                candidate=candidate.name,
                site=str(site),
                layer=layer_of[site.module],
                role=site.role.value,
                sqnr_db=found.sqnr_db,
                clipped=clipped,
                flushed=flushed,
                amax=found.amax,
                scale=largest,
                largest=limit,
                smallest_scale=None if smallest == largest else smallest,
                scale_per=per,
                **({} if measured is None else measure_fit(measured)),
            )
        )
    return sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0, row.site))


def measure_fit(measured: torch.Tensor) -> dict[str, Any]:
    """Compare a scale with the fitted one: the sums of `measure_heads` with both, [2, H, 6].

    Gives the fields of a row that tell how well it fits.
    """
    noise, least = measured[..., 1].cpu()  # the second sum of `Damage`, by head
    losses = (10 * (noise / least).log10()).clamp(max=_MOST_DB).where(noise > least, 0.0)
    worst = int(losses.argmax())
    mine, best = (Damage(*heads[worst].tolist()) for heads in measured)
    lost = [max(a - b, 0.0) for a, b in zip(mine.shares, best.shares, strict=True)]
    return {
        "loss_db": float(losses[worst]),
        "worst_db": mine.sqnr_db,
        "lost_clipped": lost[0],
        "lost_flushed": lost[1],
        "clips": bool(measured[0, :, 2].any()),
    }


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
    verdict, why = judge(summary, gate, describe_damage(rows))
    for site, sums in scores.hooks[name].damage.items():
        quantizer, count = candidate.quantizers.get(site), Damage(*sums.tolist()).clipped
        if quantizer is not None and not quantizer.saturates and count:
            verdict, why = Verdict.FAIL, f"{asked.numerics.name} turns {count:.0f} values of {site}"
            why += " into NaN or inf; here they are saturated"
            break
    if broken and verdict is not Verdict.FAIL:  # only a failure is certain
        verdict = Verdict.CANNOT_TELL
        why = f"{why}, but the unquantized model predicts no better than chance"
    positions = summarize_positions(mine.logprobs, reference.logprobs, lengths, mine.klds)
    return summary.model_copy(
        update={
            "name": name,
            "description": candidate.description,
            "verdict": verdict,
            "verdict_why": why,
            "gate": gate.name,
            "by_position": positions,
        }
    )


# --- the model in memory --------------------------------------------------------------------------


def plan_verification(
    asked: Verification,
    scratch: Path,
    *,
    walks: int = 2,
    always_streams: str = "",
    may_share: bool = False,
) -> MemoryPlan:
    """Choose between a model in memory whole and one that is streamed.

    Hidden states that do not fit into memory go to the folder `scratch`; all layers are read in
    `walks`, of which the noise floor is one. `always_streams` says why the model is streamed in any
    case. Where a GPU has room, candidates `may_share` a batch with the unquantized model.
    """
    model = asked.model
    if model.is_placed:
        return MemoryPlan()
    text = list(batches(asked.plan, asked.batch_size))
    scored = [*asked.candidates, *asked.others, *asked.rules.values()]
    logits = scoring_bytes(
        torch.device(model.device),
        int(model.source.config.get_text_config(decoder=True).vocab_size),
        DTYPES[model.dtype].itemsize,
        num_tokens=max(batch.input_ids.numel() for batch in text),
    )
    extra = {}
    roles = {site.role for each in scored for site in each.quantizers}
    if Role.P in roles:
        heads = [each.num_heads for _, each in model.prepared.geometry.attentions()]
        length = max(batch.input_ids.shape[1] for batch in text)
        extra["attention in fp32"] = attending_bytes(torch.device(model.device), max(heads), length)
    work = Workload(
        prepared=model.prepared,
        device=model.device,
        batches=text,
        scratch=scratch,
        extra=extra,
        logits_bytes=logits,
        num_models=len(scored) + 1,
        changes_weights=any(each.weights for each in scored),
        changes_inputs=Role.INPUT in roles,
        walks=walks,
        always_streams=always_streams,
    )
    work = find_limits(work, model.memory)
    plan = plan_memory(work)
    count = 1 + sum(map(can_share, scored))
    is_text = all(batch.media is None for batch in text)
    is_on_gpu = work.device_bytes is not None and not plan.is_streamed
    if not (may_share and is_text and is_on_gpu) or count == 1:
        return plan
    repeated = replace(work, batches=[repeat(batch, count) for batch in text])
    has_room = sum(whole_bytes(repeated).values()) <= (work.device_bytes or 0)
    return replace(plan_memory(repeated), models_in_a_batch=count) if has_room else plan


@contextmanager
def open_scored(
    asked: Verification, mode: MemoryPlan, progress: Progress
) -> Iterator[PreparedModel | StreamedModel]:
    """Load the model whole, or open it for streaming.

    Of one in memory, the weights that candidates replace are copied first.
    """
    model = asked.model
    if model.is_live and any(each.weights for each in asked.candidates):
        # most models are files
        from fp8calib.model.live_model import LiveCheckpoint  # noqa: PLC0415

        assert isinstance(model.checkpoint, LiveCheckpoint)  # noqa: S101 -- of every live model
        model.checkpoint.hold()
    if not mode.is_streamed:
        yield model.load(progress)
        return
    # most models fit into memory
    from fp8calib.calibration.streamed_model import open_streamed  # noqa: PLC0415

    tokens = torch.cat([torch.zeros(1, dtype=torch.int64), *asked.plan.sequences])
    with open_streamed(model.prepared, tokens, mode, model.device) as streamed:
        yield streamed


# --- the need of scales, the noise floor, rules ---------------------------------------------------


def _assess(
    asked: Verification,
    rows: Mapping[str, Sequence[LayerResult]],
    klds: Mapping[str, torch.Tensor],
    pairs: Sequence[PairedResult],
    rescore: Callable[..., Scores],
) -> KvNeed:
    """Tell whether KV scales are needed.

    Where scale 1.0 loses nothing, it adds nothing to what FP8 costs. Else it is compared with a
    candidate whose scales all fit, or with quantizers that fit, by `rescore`.
    """
    losing, added, fp8 = list_losing(rows[SCALE_ONE]), None, klds[SCALE_ONE]
    if losing:
        fitting = (
            klds[each.name]
            for each in asked.candidates
            if not each.weights and each.name != SCALE_ONE
            if any(row.loss_db is not None for row in rows[each.name])
            and not list_losing(rows[each.name])
        )
        if (found := next(fitting, None)) is None:
            one = next(each for each in asked.candidates if each.name == SCALE_ONE)
            # the smallest powers of two with which no value clips
            fits: dict[str, Any] = {"scale": Granularity.TENSOR, "power_of_two": True}
            quantizers = {
                site: replace(quantizer, **fits) if quantizer.is_scaled else quantizer
                for site, quantizer in one.quantizers.items()
            }
            fitted = Candidate(name=_FITTED, quantizers=quantizers)
            found = rescore([fitted], stage=_FITTED).candidates[_FITTED].klds
        fp8 = found
        both = {SCALE_ONE: klds[SCALE_ONE], _FITTED: fp8}
        added = compare_paired(SCALE_ONE, _FITTED, both, asked.plan.lengths)
    removed = [pair for pair in pairs if pair.base == SCALE_ONE]
    return assess_need(losing, average(fp8, asked.plan.lengths), added, removed)


def measure_noise(
    plan: DataPlan,
    batch_size: int,
    before: torch.Tensor,
    run: Callable[[list[Batch]], torch.Tensor],
) -> NoiseResult:
    """Compare the scores of the first sequences, `run` again in batches of another size.

    Several sequences in place of one are cut, so that a batch has no more tokens than before. Those
    with media stay: each is a batch of its own.
    """
    few, size = take_sequences(plan, 0, _NOISE_SEQUENCES), 1
    if batch_size == 1:
        size = _NOISE_BATCH
        cut = [
            sequence if index in few.media else sequence[: max(2, len(sequence) // size)]
            for index, sequence in enumerate(few.sequences)
        ]
        few = replace(few, sequences=tuple(cut))
    again = run(list(batches(few, size)))
    parts = split_sequences(before, plan.lengths)
    kept = [part[: length - 1] for part, length in zip(parts, few.lengths, strict=False)]
    changes = again.double() - torch.cat(kept).double()
    return NoiseResult(tokens=len(again), kld=float(changes.square().mean()) / 2)


def _rank_rules(asked: Verification, scores: Scores) -> tuple[RuleResult, ...]:
    """Rank the rules, the smallest divergence first."""
    lengths = asked.plan.lengths
    mine = {rule: scores.candidates[_RULE + rule] for rule in asked.rules}
    klds = {rule: each.klds for rule, each in mine.items()}
    found = {rule: summarize(each, scores.reference, lengths) for rule, each in mine.items()}
    ranked = sorted(found, key=lambda rule: found[rule].kld_mean or 0.0)
    measured = next((each.name for each in asked.opened if each.stats is not None), "")
    return tuple(
        RuleResult(
            candidate=measured,
            rule=rule,
            ppl_ratio=found[rule].ppl_ratio,
            ppl_ratio_se=found[rule].ppl_ratio_se,
            kld_mean=found[rule].kld_mean or 0.0,
            kld_se=found[rule].kld_se,
            against_best=compare_paired(rule, ranked[0], klds, lengths)
            if rule != ranked[0]
            else None,
        )
        for rule in ranked
    )
