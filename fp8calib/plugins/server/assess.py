"""A server beside the emulated candidates: its figures, and which candidate explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8calib.plugins.server.answers import ServerScores
from fp8calib.plugins.server.decoding import DecodingAnswers, assess_decoding
from fp8calib.plugins.server.diagnose import (
    Changes,
    Diagnosis,
    diagnose,
    explain_with_faults,
    mean_square,
    needs_faults,
)
from fp8calib.plugins.server.estimates import TopTokens, WrittenText, low_variance
from fp8calib.plugins.server.faults import Fault, FaultRunner
from fp8calib.plugins.server.result import (
    EstimateResult,
    ExplanationResult,
    ServerResult,
    UnquantizedServer,
)
from fp8calib.plugins.server.sentences import describe_diagnosis
from fp8calib.verification.report import Figures
from fp8calib.verification.summary import (
    average,
    bounded_exp,
    summarize_logprobs,
)
from fp8calib.verification.tables import format_mean_kld


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What servers answered about the text."""

    scores: ServerScores
    again: ServerScores
    """The same server, about the first sequences once more."""
    reference: ServerScores | None = None
    """An unquantized server."""
    num_given: int | None = None
    """How many tokens begin every sequence, if the unquantized model wrote the rest."""
    repeated: int = 0
    """Requests sent again, to either server."""
    decoding: DecodingAnswers | None = None
    """What the server wrote itself."""

    @property
    def watched(self) -> list[torch.Tensor] | None:
        """The tokens whose log-probabilities by the unquantized model are needed."""
        if not self.scores.num_top:
            return None
        return [each.top_ids for each in self.scores.sequences]

    @property
    def noise(self) -> float:
        """The mean square of the changes from one scoring to the next."""
        first = self.scores.logprobs[: len(self.again.logprobs)]
        return mean_square((self.again.logprobs - first).double())


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
    runner: FaultRunner | None = None
    """None where nothing is emulated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessment:
    """The figures of a server, and its diagnosis."""

    summary: Figures
    result: ServerResult
    logprobs: torch.Tensor
    reference: torch.Tensor
    """The log-probabilities that it is compared with: fp32 [N]."""


def assess(
    answers: ServerAnswers, evidence: ServerEvidence, sequences: Sequence[torch.Tensor]
) -> Assessment:
    """Compare a server with the unquantized model, here or in a server, and with candidates.

    `sequences` are the token ids of the text.
    """
    lengths = list(map(len, sequences))
    scores = answers.scores
    reference = evidence.reference if answers.reference is None else answers.reference.logprobs
    assert reference is not None  # noqa: S101 -- there is a model or a server
    top = _find_top(answers, evidence, sequences)
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
    changes = (scores.logprobs - reference).double()
    found, faults = _diagnose(answers, evidence, changes, lengths)
    result = ServerResult(
        url=scores.url,
        kind=scores.kind,
        model=scores.model,
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
        noise_rms=answers.noise**0.5,
        engine=_compare_engines(answers.reference, evidence.reference),
        **klds,
        top_covered=None if top is None else top.covered,
        repeated_requests=answers.repeated,
        decoding=None if answers.decoding is None else assess_decoding(answers.decoding),
        explanations=tuple(
            ExplanationResult(
                candidate=fit.name, correlation=fit.correlation, residual_rms=fit.residual
            )
            for fit in found.fits
        ),
    )
    return Assessment(summary=summary, result=result, logprobs=scores.logprobs, reference=reference)


def _estimate(
    answers: ServerAnswers,
    reference: torch.Tensor,
    top: TopTokens | None,
    lengths: Sequence[int],
) -> dict[str, EstimateResult]:
    """Estimate the KL divergence: the fields of a `ServerResult` that the answers allow."""
    server = answers.scores.logprobs
    if answers.num_given is None:
        if top is None:
            return {}
        value, se = average(top.merged(), lengths)
        return {"kld_at_least": EstimateResult(value=value, se=se)}
    written = WrittenText(lengths=lengths, num_given=answers.num_given)
    found = {
        "kld_low_variance": written.mean(low_variance(reference, server)),
        "kld_log_ratio": written.mean((reference - server).double()),
    }
    if top is not None:
        found["kld_top"] = written.mean(top.corrected(reference, server))
        found["kld_at_least"] = written.mean(top.merged())
    return found


def _find_top(
    answers: ServerAnswers, evidence: ServerEvidence, sequences: Sequence[torch.Tensor]
) -> TopTokens | None:
    """Find what both know about the tokens that the server names; None if nothing."""
    if not answers.scores.num_top:
        return None
    ids, q = _join_top(answers.scores)
    if answers.reference is not None:
        others, known = _join_top(answers.reference)
        same = ids.unsqueeze(2) == others.unsqueeze(1)
        p = torch.where(same, known.unsqueeze(1), -torch.inf).amax(2)
    elif evidence.watched is not None:
        p = evidence.watched[:, :-1]
    else:
        return None
    sent = torch.cat([sequence[1:] for sequence in sequences]).unsqueeze(1)
    has_sent = ((ids == sent) & p.isfinite()).any(1)
    return TopTokens(p=p.double(), q=q.double(), has_sent=has_sent)


def _find_agreement(answers: ServerAnswers, evidence: ServerEvidence) -> torch.Tensor | None:
    """Tell for every token whether both name the same most likely one: bool [N]."""
    if not answers.scores.num_top:
        return None
    if answers.reference is not None:
        return _join_top(answers.scores)[0][:, 0] == _join_top(answers.reference)[0][:, 0]
    watched = evidence.watched
    return None if watched is None else watched[:, 0] == watched[:, -1]


def _join_top(scores: ServerScores) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the tokens [N, K] that a server names, and their log-probabilities."""
    return (
        torch.cat([each.top_ids for each in scores.sequences]),
        torch.cat([each.top_logprobs for each in scores.sequences]),
    )


def _compare_engines(
    scores: ServerScores | None, reference: torch.Tensor | None
) -> UnquantizedServer | None:
    if scores is None:
        return None
    found = UnquantizedServer(url=scores.url, kind=scores.kind, change_rms=None, ppl_ratio=None)
    if reference is None:
        return found
    changes = (scores.logprobs - reference).double()
    rms, ratio = mean_square(changes) ** 0.5, bounded_exp(-float(changes.mean()))
    return found.model_copy(update={"change_rms": rms, "ppl_ratio": ratio})


def _diagnose(
    answers: ServerAnswers,
    evidence: ServerEvidence,
    changes: torch.Tensor,
    lengths: Sequence[int],
) -> tuple[Diagnosis, Mapping[str, Fault]]:
    """Find what explains the server; give the faults that may be named, by name."""
    given = Changes(
        server=changes, candidates=evidence.candidates, lengths=lengths, noise=answers.noise
    )
    found = diagnose(given)
    runner = evidence.runner
    if runner is None or not runner.faults or not needs_faults(found):
        return found, evidence.faults
    base = max(runner.faults, key=lambda name: given.fit(name).correlation or 0.0)
    few = Changes(
        server=changes[: runner.num_tokens],
        candidates={name: each[: runner.num_tokens] for name, each in given.candidates.items()},
        lengths=lengths[: runner.num_sequences],
        noise=answers.noise,
    )
    own = runner.faults[base]
    faults = {**evidence.faults, **own}
    whole = {name: each for name, each in own.items() if each.layer is None}
    single = {name: each for name, each in own.items() if each.layer is not None}
    effects = runner.run(whole, "faults of all layers")
    if whole:
        tried = explain_with_faults(found, few, base, own, effects)
        if tried.name in whole and not needs_faults(tried):
            return tried, faults
    effects = {**runner.run(single, f"{len(single)} faults of single layers"), **effects}
    return explain_with_faults(found, few, base, own, effects), faults
