"""Which type of the KV cache to serve: what the paired comparisons of a report tell."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import (
    SCALE_ONE,
    CandidateResult,
    PairedAnswer,
    PairedResult,
    describe_pair,
)

_SAME_BYTES = 1.1
"""Caches whose sizes differ by less are compared in percent, and none is called smaller: a scale
for a token adds 6 %."""


def recommend(
    usable: Sequence[CandidateResult],
    fp8: Sequence[CandidateResult],
    paired: Mapping[tuple[str, str], PairedResult],
    engine: str,
) -> tuple[str, str]:
    """Recommend what loses least; of what loses the same, what needs the least memory.

    Nothing is recommended where a candidate that needs no more memory may lose less.

    Args:
        usable: the candidates with a KV cache that pass their gates.
        fp8: all candidates with an FP8 cache.
        paired: the comparisons, by candidate and base.
        engine: the name of the engine.

    Returns:
        The candidate, empty where the text cannot tell which is better; and why.
    """
    if not usable:
        return "", "No type of the KV cache passes."
    exact = min(usable, key=get_kld)
    rivals = [one for one in usable if one is not exact and count_bytes(one) <= count_bytes(exact)]
    answers = {one.name: _find_pair(one.name, exact.name, paired).answer for one in rivals}
    same = [one for one in rivals if answers[one.name] is PairedAnswer.NO_DIFFERENCE]
    chosen = min((exact, *same), key=lambda one: (count_bytes(one), get_kld(one)))
    unclear = [
        one
        for one in rivals
        if answers[one.name] is PairedAnswer.CANNOT_TELL and count_bytes(one) <= count_bytes(chosen)
    ]
    if unclear:
        others = "; ".join(
            f"against {describe_candidate(exact)}, {name_candidate(one.name)} "
            f"{describe_pair(_find_pair(one.name, exact.name, paired))}"
            for one in unclear
        )
        return "", f"Which type of the KV cache loses least cannot be told: {others}."
    smaller = [one for one in usable if count_bytes(one) * _SAME_BYTES < count_bytes(chosen)]
    text = f"Of the types of the KV cache use {_explain(chosen, fp8, paired)}"
    text = f"{text}{_name_backends(chosen, engine)}"
    if smaller:
        smallest = min(smaller, key=lambda one: (count_bytes(one), get_kld(one)))
        text = f"{text}. The smallest that passes is {describe_candidate(smallest)}"
    return chosen.name, f"{text}."


def _explain(
    chosen: CandidateResult,
    fp8: Sequence[CandidateResult],
    paired: Mapping[tuple[str, str], PairedResult],
) -> str:
    """Compare the choice with the best FP8 cache, which most users have."""
    text = f"{name_candidate(chosen.name)}: KLD {format_mean_kld(chosen.kld_mean, chosen.kld_se)}"
    base = min(fp8, key=get_kld)
    if chosen in fp8:
        return f"{text}; no other that passes loses less"
    if get_kld(base) > 2 * get_kld(chosen) > 0:
        times = f"{float(f'{get_kld(base) / get_kld(chosen):.2g}'):,.0f} times below"
    else:
        change = _find_pair(chosen.name, base.name, paired)
        times = f"which {describe_pair(change)} against"
    ratio = count_bytes(chosen) / count_bytes(base)
    size = f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'fewer'} bytes"
    if not 1 / _SAME_BYTES < ratio < _SAME_BYTES:
        size = f"{ratio:.2g} times its bytes"
    elif size.startswith("0%"):
        size = "the same bytes"
    fp8_name = "FP8 at scale 1.0" if base.name == SCALE_ONE else f"FP8 with {base.name}"
    return f"{text}, {times} {fp8_name} ({format_mean_kld(base.kld_mean, base.kld_se)}), {size}"


def _name_backends(chosen: CandidateResult, engine: str) -> str:
    backends: Collection[str] = () if chosen.kv_cache is None else chosen.kv_cache.backends
    if not backends:
        return ""
    only = " only" if len(backends) == 1 else ""
    return f"; {engine} serves it with {' or '.join(backends)}{only}"


def _find_pair(
    candidate: str, base: str, paired: Mapping[tuple[str, str], PairedResult]
) -> PairedResult:
    """Find the comparison of two candidates; scale 1.0 is only compared against."""
    if (candidate, base) in paired:
        return paired[candidate, base]
    found = paired[base, candidate]
    turned = {
        PairedAnswer.BETTER: PairedAnswer.WORSE,
        PairedAnswer.WORSE: PairedAnswer.BETTER,
    }
    return found.model_copy(
        update={
            "candidate": candidate,
            "base": base,
            "difference": -found.difference,
            "answer": turned.get(found.answer, found.answer),
        }
    )


def describe_candidate(one: CandidateResult) -> str:
    """Describe a candidate by its size and its loss."""
    kld = format_mean_kld(one.kld_mean, one.kld_se)
    return f"{name_candidate(one.name)} ({count_bytes(one):,.0f} bytes a token, KLD {kld})"


def name_candidate(candidate: str) -> str:
    """Name a candidate inside a sentence."""
    return "scale 1.0" if candidate == SCALE_ONE else candidate


def count_bytes(one: CandidateResult) -> float:
    """Count the bytes of a token in the cache of a candidate that has one."""
    assert one.kv_cache is not None  # noqa: S101 -- only such are compared
    return one.kv_cache.bytes_per_token


def get_kld(one: CandidateResult) -> float:
    """Give the mean divergence of an emulated candidate, which is always known."""
    assert one.kld_mean is not None  # noqa: S101
    return one.kld_mean
