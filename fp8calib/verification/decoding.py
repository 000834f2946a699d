"""Candidates on the second half of each sequence: scored as a prompt, and as it is served."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from fp8calib.geometry.sites import Role
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.decoding import find_decoded
from fp8calib.verification.paired import compare_paired
from fp8calib.verification.report import DecodeResult, PairedAnswer, describe_pair
from fp8calib.verification.score import Scores
from fp8calib.verification.summary import average
from fp8calib.verification.token_scores import select_lengths

_AS_PROMPT = "a prompt"


def list_decode_emulations(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """List what runs beside the candidates whose prompt is computed otherwise than later tokens."""
    found: dict[str, Candidate] = {}
    for candidate in candidates:
        if candidate.engine_prompt_in_16_bits:
            found[_served_key(candidate)] = replace(candidate, prompt_in_16_bits=True)
            if (prompt := _emulate_prompt(candidate)) is not None:
                found[_prompt_key(candidate)] = prompt
    return found


def compare_decoding(
    candidates: Sequence[Candidate], compared: Scores, lengths: Sequence[int]
) -> tuple[DecodeResult, ...]:
    """Compare both scores of each candidate with a KV cache, on tokens that steps predict."""
    decoded = find_decoded(lengths)
    kept = select_lengths(decoded, lengths)
    return tuple(
        _compare(candidate, _find_klds(candidate, compared), decoded, kept)
        for candidate in candidates
        if candidate.has_cache
    )


def _compare(
    candidate: Candidate,
    klds: Mapping[str, torch.Tensor],
    decoded: torch.Tensor,
    lengths: Sequence[int],
) -> DecodeResult:
    chosen = {name: each[decoded] for name, each in klds.items()}
    pair = compare_paired(candidate.name, _AS_PROMPT, chosen, lengths)
    means = {name: average(each, lengths) for name, each in chosen.items()}
    return DecodeResult(
        candidate=candidate.name,
        tokens=int(decoded.sum()),
        is_same=not candidate.engine_prompt_in_16_bits,
        prompt_kld=means[_AS_PROMPT][0],
        prompt_kld_se=means[_AS_PROMPT][1],
        decode_kld=means[candidate.name][0],
        decode_kld_se=means[candidate.name][1],
        difference=pair,
        sentence=" ".join(_describe(candidate, pair.answer, describe_pair(pair))),
    )


def _describe(candidate: Candidate, answer: PairedAnswer, words: str) -> Iterator[str]:
    name = candidate.name
    if not candidate.engine_prompt_in_16_bits:
        yield f"{name}: a prompt is read from the cache too: decoding computes the same."
        return
    yield f"{name}: attention of a prompt is in 16 bits; decoding {words}."
    if answer is PairedAnswer.WORSE:
        yield "Scores of prompts do not show what it costs."


def _find_klds(candidate: Candidate, compared: Scores) -> dict[str, torch.Tensor]:
    """Find the divergences as it is served, and as a prompt: fp32 [N] each."""
    if not candidate.engine_prompt_in_16_bits:
        klds = compared.candidates[candidate.name].klds
        return {candidate.name: klds, _AS_PROMPT: klds}
    prompt = compared.candidates.get(_prompt_key(candidate), compared.reference)
    served = compared.candidates[_served_key(candidate)]
    return {candidate.name: served.klds, _AS_PROMPT: prompt.klds}


def _emulate_prompt(candidate: Candidate) -> Candidate | None:
    """Emulate the whole text as a prompt in 16 bits; None where that is the unquantized model."""
    others = {
        site: quantizer
        for site, quantizer in candidate.quantizers.items()
        if site.role not in {Role.K, Role.V, Role.Q, Role.P}
    }
    if not others and not candidate.weights:
        return None
    return replace(candidate, quantizers=others)


def _served_key(candidate: Candidate) -> str:
    return f"\0served:{candidate.name}"


def _prompt_key(candidate: Candidate) -> str:
    return f"\0prompt:{candidate.name}"
