"""A server beside the emulated candidates: its figures, and which candidate explains them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fp8calib.calibration import Progress
from fp8calib.data.plan import DataPlan
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.compare.comparison import Comparison, ComparisonResult
from fp8calib.verification.compare.summary import Summary, summarize_logprobs
from fp8calib.verification.emulation.emulate import Emulation
from fp8calib.verification.report import (
    ExplanationResult,
    ServerResult,
    format_kld,
)
from fp8calib.verification.sensitivity import LAYERS_AT_ONCE, choose_batches
from fp8calib.verification.server.diagnose import (
    Changes,
    Diagnosis,
    explain,
    explain_with_faults,
    mean_square,
    needs_layers,
)
from fp8calib.verification.server.estimates import estimate_from_top
from fp8calib.verification.server.hypotheses import (
    Fault,
    has_kv_scales,
    list_layer_faults,
    lose_query_scales,
)
from fp8calib.verification.server.kind import ServerScores
from fp8calib.verification.server.sentences import Context, describe


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAnswers:
    """What servers answered about the text."""

    scores: ServerScores
    again: ServerScores
    """The same server, about the first sequences once more."""

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
class Assessment:
    """The figures of a server, and its diagnosis."""

    summary: Summary
    result: ServerResult
    logprobs: torch.Tensor
    changes: torch.Tensor
    """By token: fp64 [N]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Emulated:
    """The emulations that ran, and what is needed to run others."""

    comparison: Comparison
    compared: ComparisonResult
    geometry: ModelGeometry
    candidates: Sequence[Candidate]
    faults: Mapping[str, Fault]
    """Of `list_faults`: they ran beside the candidates."""
    plan: DataPlan
    batch_size: int


def list_faults(candidates: Sequence[Candidate]) -> dict[str, Fault]:
    """List the faults that run beside the candidates: those that concern all layers."""
    return {
        name: fault
        for candidate in candidates
        for name, fault in lose_query_scales(candidate.name, candidate.emulation).items()
    }


def assess(answers: ServerAnswers, emulated: Emulated, progress: Progress) -> Assessment:
    """Compare a server with the unquantized model and with every candidate."""
    compared = emulated.compared
    lengths = [len(sequence) for sequence in emulated.plan.sequences]
    logprobs = answers.scores.logprobs
    changes = (logprobs - compared.reference.logprobs).double()
    watched, top = compared.reference.watched, None
    if answers.scores.num_top:
        top = torch.cat([each.top_logprobs for each in answers.scores.sequences])
    bound = None if top is None else estimate_from_top(watched, top, lengths)
    summary = summarize_logprobs(
        logprobs,
        compared.reference.logprobs,
        lengths,
        agrees=None if top is None else watched[:, 0] == watched[:, -1],
    )
    found, faults = _diagnose(answers, emulated, changes, lengths, progress)
    kld = "" if bound is None else f"KLD at least {format_kld(bound.value)}"
    has_scales = any(has_kv_scales(candidate.emulation) for candidate in emulated.candidates)
    context = Context(faults=faults, has_scales=has_scales, ppl_ratio=summary.ppl_ratio, kld=kld)
    result = ServerResult(
        url=answers.scores.url,
        kind=answers.scores.kind,
        model=answers.scores.model,
        finding=found.finding.value,
        explained_by=found.name,
        sentence=describe(found, context),
        change_rms=found.size,
        noise_rms=answers.noise**0.5,
        kld_at_least=None if bound is None else bound.value,
        kld_at_least_se=None if bound is None else bound.error,
        top_covered=None if bound is None else bound.covered,
        explanations=tuple(
            ExplanationResult(
                candidate=fit.name, correlation=fit.correlation, residual_rms=fit.residual
            )
            for fit in found.fits
        ),
    )
    return Assessment(summary=summary, result=result, logprobs=logprobs, changes=changes)


def _diagnose(
    answers: ServerAnswers,
    emulated: Emulated,
    changes: torch.Tensor,
    lengths: Sequence[int],
    progress: Progress,
) -> tuple[Diagnosis, dict[str, Fault]]:
    """Find what explains the server; give the faults that were tried, by name."""
    compared, faults = emulated.compared, dict(emulated.faults)
    names = [*(candidate.name for candidate in emulated.candidates), *faults]
    given = Changes(
        server=changes,
        candidates={name: _changes_of(compared, name) for name in names},
        lengths=lengths,
        noise=answers.noise,
    )
    found = explain(given)
    base = _choose_base(emulated.candidates, given)
    if base is None or not needs_layers(found):
        return found, faults
    tried = dict(list_layer_faults(base.name, base.emulation, emulated.geometry))
    ran = _run_faults(emulated, tried, progress)
    few = Changes(
        server=changes[: ran.num_tokens],
        candidates={name: each[: ran.num_tokens] for name, each in given.candidates.items()},
        lengths=lengths[: ran.num_sequences],
        noise=answers.noise,
    )
    return explain_with_faults(found, few, base.name, ran.changes), {**faults, **tried}


def _changes_of(compared: ComparisonResult, name: str) -> torch.Tensor:
    return (compared.candidates[name].logprobs - compared.reference.logprobs).double()


def _choose_base(candidates: Sequence[Candidate], given: Changes) -> Candidate | None:
    """Choose the candidate with KV scales that comes closest to the server."""
    scaled = [candidate for candidate in candidates if has_kv_scales(candidate.emulation)]
    return max(scaled, key=lambda each: given.fit(each.name).correlation or 0.0, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class _RanFaults:
    changes: dict[str, torch.Tensor]
    num_tokens: int
    num_sequences: int


def _run_faults(emulated: Emulated, faults: Mapping[str, Fault], progress: Progress) -> _RanFaults:
    """Emulate faults of single layers on the first sequences."""
    chosen = choose_batches(emulated.plan, emulated.batch_size)
    lengths = [length for batch in chosen for length in batch.lengths]
    names = list(faults)
    rounds = [names[i : i + LAYERS_AT_ONCE] for i in range(0, len(names), LAYERS_AT_ONCE)]
    progress.stage(
        "faults of single layers", sum(lengths) * (len(names) + len(rounds)), unit="tokens"
    )
    changes: dict[str, torch.Tensor] = {}
    for some in rounds:
        emulations: dict[str, Emulation] = {name: faults[name].emulation for name in some}
        compared = emulated.comparison.run(chosen, emulations, advance=progress.advance)
        changes |= {name: _changes_of(compared, name) for name in some}
    return _RanFaults(
        changes=changes, num_tokens=sum(lengths) - len(lengths), num_sequences=len(lengths)
    )
