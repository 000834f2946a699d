"""A server beside the emulated candidates: its figures, and which candidate explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.model.prepared import PreparedModel
from fp8calib.plugins.server.ask import ServerAnswers
from fp8calib.plugins.server.diagnose import (
    Changes,
    Diagnosis,
    ServerFinding,
    describe_diagnosis,
    diagnose,
    explain_with_faults,
    mean_square,
    needs_faults,
)
from fp8calib.plugins.server.estimates import TopTokens, average_written, low_variance
from fp8calib.plugins.server.faults import (
    Fault,
    choose_text,
    has_scaled_kv,
    list_kv_faults,
    run_faults,
)
from fp8calib.plugins.server.result import SERVER, EstimateResult, ServerResult, UnquantizedServer
from fp8calib.verification.judge.gates import Gate, judge
from fp8calib.verification.report import SCALE_ONE, CandidateResult, Decision, Verdict, VerifyReport
from fp8calib.verification.summary import (
    average,
    bounded_exp,
    summarize_logprobs,
    summarize_positions,
)
from fp8calib.verification.tables import format_mean_kld
from fp8calib.verification.verify import Verification


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerEvidence:
    """What a server is compared with. N tokens, of all sequences in order."""

    reference: torch.Tensor | None
    """Log-probabilities by the unquantized model: fp32 [N]; None if it did not run."""
    watched: torch.Tensor | None
    """As `TokenScores.watched`, for the tokens that the server names; None if unknown."""
    candidates: Mapping[str, torch.Tensor]
    """Changes by every emulated candidate: fp64 [N]."""
    has_scales: bool
    """Whether one of them has scales that the server should use."""
    faults: Mapping[str, Fault]
    """The fault of each entry of `candidates` that is not a candidate of the report."""
    model: PreparedModel | StreamedModel | None = None
    """It runs further faults; None where nothing is emulated."""


def assess(
    answers: ServerAnswers,
    evidence: ServerEvidence,
    asked: Verification,
    gate: Gate,
    progress: Progress,
) -> tuple[ServerResult, CandidateResult]:
    """Compare a server with the unquantized model, here or in a server, and with candidates.

    Give the result, and its row in the report.
    """
    server, lengths, scores = answers.servers[0], asked.plan.lengths, answers.scores
    reference = answers.choose_reference(evidence.reference)
    top = _find_top(answers, evidence, asked)
    klds = _estimate(answers, reference, top, lengths)
    low, bound = klds.get("kld_low_variance"), klds.get("kld_at_least")
    summary = summarize_logprobs(
        scores.logprobs,
        reference,
        lengths,
        agrees=_find_agreement(answers, evidence),
        kld=(None, None) if low is None else (low.value, low.se),
    )
    words = ""
    if known := low or bound:
        about = "KLD" if low else "KLD at least"
        words = f"{about} {format_mean_kld(known.value, known.se)}"
    first = scores.logprobs[: len(answers.again.logprobs)]
    given = Changes(
        server=(scores.logprobs - reference).double(),
        candidates=evidence.candidates,
        lengths=lengths,
        noise=mean_square((answers.again.logprobs - first).double()),
    )
    found, faults = _diagnose(given, evidence, asked, progress)
    result = ServerResult(
        url=server.client.url,
        kind=server.kind.name,
        model=server.model,
        finding=found.finding.value,
        explained_by=found.name,
        sentence=describe_diagnosis(
            found,
            faults,
            has_scales=evidence.has_scales,
            has_reference=answers.reference is not None,
            ppl_ratio=summary.ppl_ratio,
            kld=words,
        ),
        change_rms=found.size,
        noise_rms=given.noise**0.5,
        engine=_compare_engines(answers, evidence.reference),
        **klds,
        top_covered=None if top is None else top.covered,
        repeated_requests=sum(each.client.repeated for each in answers.servers),
        decoding=answers.decoding,
        explanations=found.fits,
    )
    verdict, why = _judge(summary, gate, result)
    row = summary.model_copy(
        update={
            "name": SERVER,
            "description": f"{result.kind} at {result.url}, model {result.model}",
            "verdict": verdict,
            "verdict_why": why,
            "gate": gate.name,
            "by_position": summarize_positions(scores.logprobs, reference, lengths),
        }
    )
    return result, row


def add_server(report: VerifyReport, result: ServerResult, row: CandidateResult) -> VerifyReport:
    """Add the server to a report, before scale 1.0; its diagnosis is the advice."""
    last = [one for one in report.candidates if one.name == SCALE_ONE]
    others = [one for one in report.candidates if one.name != SCALE_ONE]
    headline, details = result.sentence, ""
    if result.decoding is not None:
        headline, details = result.decoding.sentence, result.sentence
    decision = Decision(headline=headline, details=details)
    changed = {"candidates": (*others, row, *last), "decision": decision}
    return report.model_copy(update=changed)


def _judge(summary: CandidateResult, gate: Gate, result: ServerResult) -> tuple[Verdict, str]:
    """Give the verdict of the gate; a server with a fault does not just pass."""
    verdict, why = judge(summary, gate)
    passes = verdict in {Verdict.PASS, Verdict.NO_DIFFERENCE}
    if result.finding == ServerFinding.UNKNOWN and passes:
        verdict, why = Verdict.WARN, f"{why}, but no candidate explains what the server changes"
    if result.decoding is not None and result.decoding.answer == "worse":
        verdict = Verdict.WARN if passes else verdict
        why = f"{why}, but decoding and prompts do not agree"
    return verdict, why


def _estimate(
    answers: ServerAnswers,
    reference: torch.Tensor,
    top: TopTokens | None,
    lengths: Sequence[int],
) -> dict[str, EstimateResult]:
    """Estimate the KL divergence: the fields of a `ServerResult` that the answers allow."""
    server, num_given = answers.scores.logprobs, answers.num_given
    if num_given is None:
        if top is None:
            return {}
        value, se = average(top.merged(), lengths)
        return {"kld_at_least": EstimateResult(value=value, se=se)}
    values = {
        "kld_low_variance": low_variance(reference, server),
        "kld_log_ratio": (reference - server).double(),
    }
    if top is not None:
        values["kld_top"] = top.corrected(reference, server)
        values["kld_at_least"] = top.merged()
    return {name: average_written(each, lengths, num_given) for name, each in values.items()}


def _find_top(
    answers: ServerAnswers, evidence: ServerEvidence, asked: Verification
) -> TopTokens | None:
    """Find what both know about the tokens that the server names; None if nothing."""
    ids, other = answers.scores.top_ids, answers.reference
    if not ids.shape[1]:
        return None
    if other is not None:
        same = ids.unsqueeze(2) == other.top_ids.unsqueeze(1)
        p = torch.where(same, other.top_logprobs.unsqueeze(1), -torch.inf).amax(2)
    elif evidence.watched is not None:
        p = evidence.watched[:, :-1]
    else:
        return None
    sent = torch.cat([sequence[1:] for sequence in asked.plan.sequences]).unsqueeze(1)
    has_sent = ((ids == sent) & p.isfinite()).any(1)
    return TopTokens(p=p.double(), q=answers.scores.top_logprobs.double(), has_sent=has_sent)


def _find_agreement(answers: ServerAnswers, evidence: ServerEvidence) -> torch.Tensor | None:
    """Tell for every token whether both name the same most likely one: bool [N]."""
    ids, other, watched = answers.scores.top_ids, answers.reference, evidence.watched
    if not ids.shape[1]:
        return None
    if other is not None:
        return ids[:, 0] == other.top_ids[:, 0]
    return None if watched is None else watched[:, 0] == watched[:, -1]


def _compare_engines(
    answers: ServerAnswers, reference: torch.Tensor | None
) -> UnquantizedServer | None:
    if answers.reference is None:
        return None
    other = answers.servers[1]
    rms, ratio = None, None
    if reference is not None:
        changes = (answers.reference.logprobs - reference).double()
        rms, ratio = mean_square(changes) ** 0.5, bounded_exp(-float(changes.mean()))
    return UnquantizedServer(
        url=other.client.url, kind=other.kind.name, change_rms=rms, ppl_ratio=ratio
    )


def _diagnose(
    given: Changes, evidence: ServerEvidence, asked: Verification, progress: Progress
) -> tuple[Diagnosis, Mapping[str, Fault]]:
    """Find what explains the server; give the faults that may be named, by name."""
    found, model = diagnose(given), evidence.model
    scaled = [each for each in asked.candidates if has_scaled_kv(each)]
    if model is None or not scaled or not needs_faults(found):
        return found, evidence.faults
    base = max(scaled, key=lambda each: given.fit(each.name).correlation or 0.0)
    own = list_kv_faults(base, model.geometry)
    text = choose_text(asked.plan, asked.batch_size, len(own))
    lengths = [length for batch in text for length in batch.lengths]
    num_tokens = sum(lengths) - len(lengths)
    few = Changes(
        server=given.server[:num_tokens],
        candidates={name: each[:num_tokens] for name, each in given.candidates.items()},
        lengths=lengths,
        noise=given.noise,
    )
    faults = {**evidence.faults, **own}
    whole = {name: each for name, each in own.items() if each.layer is None}
    single = {name: each for name, each in own.items() if each.layer is not None}
    run = partial(run_faults, model, text, asked.plan.num_tokens, progress)
    effects = run(whole, "faults of all layers")
    if whole:
        tried = explain_with_faults(found, few, base.name, own, effects)
        if tried.name in whole and not needs_faults(tried):
            return tried, faults
    effects = {**run(single, f"{len(single)} faults of single layers"), **effects}
    return explain_with_faults(found, few, base.name, own, effects), faults
