"""Candidates on the second half of each sequence: scored as a prompt, and as it is served."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from fp8calib.model.geometry import Role
from fp8calib.plugins.server.result import ServedResult
from fp8calib.plugins.server.served_hooks import ServedHooks, find_decoded
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.report import PairedAnswer
from fp8calib.verification.score import Scores
from fp8calib.verification.summary import average, compare_paired
from fp8calib.verification.tables import describe_pair
from fp8calib.verification.token_scores import select_lengths

_AS_PROMPT = "a prompt"


def list_served(candidates: Sequence[Candidate]) -> Iterator[Candidate]:
    """List what runs beside candidates of an engine whose prompts are computed in 16 bits."""
    for candidate in candidates:
        if candidate.has_cache:
            yield replace(candidate, name=_served_key(candidate), make_hooks=ServedHooks)
            others = {
                site: quantizer
                for site, quantizer in candidate.quantizers.items()
                if site.role not in {Role.K, Role.V, Role.Q, Role.P}
            }
            if others or candidate.weights:  # else a prompt is the unquantized model's
                yield replace(candidate, name=_prompt_key(candidate), quantizers=others)


def compare_served(
    candidates: Sequence[Candidate], scores: Scores, lengths: Sequence[int]
) -> tuple[ServedResult, ...]:
    """Compare both scores of each candidate with a KV cache, on tokens that steps predict."""
    decoded = find_decoded(lengths)
    kept = select_lengths(decoded, lengths)
    results = []
    for candidate in candidates:
        if not candidate.has_cache:
            continue
        served = scores.candidates.get(_served_key(candidate))
        klds = {candidate.name: scores.candidates[candidate.name].klds}
        klds[_AS_PROMPT] = klds[candidate.name]
        if served is not None:
            prompt = scores.candidates.get(_prompt_key(candidate), scores.reference)
            klds = {candidate.name: served.klds, _AS_PROMPT: prompt.klds}
        chosen = {name: each[decoded] for name, each in klds.items()}
        pair = compare_paired(candidate.name, _AS_PROMPT, chosen, kept)
        means = {name: average(each, kept) for name, each in chosen.items()}
        results.append(
            ServedResult(
                candidate=candidate.name,
                tokens=int(decoded.sum()),
                is_same=served is None,
                prompt_kld=means[_AS_PROMPT][0],
                prompt_kld_se=means[_AS_PROMPT][1],
                decode_kld=means[candidate.name][0],
                decode_kld_se=means[candidate.name][1],
                difference=pair,
                sentence=_describe(candidate.name, pair.answer, describe_pair(pair))
                if served is not None
                else f"{candidate.name}: a prompt is read from the cache too: decoding computes "
                "the same.",
            )
        )
    return tuple(results)


def _describe(name: str, answer: PairedAnswer, words: str) -> str:
    text = f"{name}: attention of a prompt is in 16 bits; decoding {words}."
    if answer == "worse":
        text = f"{text} Scores of prompts do not show what it costs."
    return text


def _served_key(candidate: Candidate) -> str:
    return f"\0served:{candidate.name}"


def _prompt_key(candidate: Candidate) -> str:
    return f"\0prompt:{candidate.name}"
