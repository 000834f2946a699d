"""Which type of the KV cache to serve: what paired comparisons tell."""

from __future__ import annotations

from collections.abc import Sequence

from fp8calib.plugins.kv_types.result import CacheResult
from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import PairedAnswer, PairedResult, Verdict, describe_pair

_SMALLER = 1.1
"""What needs less by a smaller factor is not called smaller: a scale for a token adds 6 %."""


def recommend(
    rows: Sequence[CacheResult], pairs: Sequence[PairedResult]
) -> tuple[CacheResult | None, str]:
    """Recommend what loses least; of what loses the same, what needs the least memory.

    Nothing is recommended where a type that needs no more memory may lose less.

    Args:
        rows: the types, FP8 among them.
        pairs: the comparisons of all with all.

    Returns:
        The type, None where the text cannot tell which is better; and why.
    """
    usable = [row for row in rows if row.verdict not in {Verdict.FAIL, Verdict.CANNOT_TELL}]
    if not usable:
        return None, "No type of the KV cache passes."
    exact = min(usable, key=_get_kld)
    rivals = [r for r in usable if r is not exact and r.bytes_per_token <= exact.bytes_per_token]
    told = {row.name: _compare(row.name, exact.name, pairs) for row in rivals}
    same = [row for row in rivals if told[row.name].answer is PairedAnswer.NO_DIFFERENCE]
    chosen = min((exact, *same), key=_rank)
    unclear = [
        f"{row.name} {describe_pair(told[row.name])}"
        for row in rivals
        if told[row.name].answer is PairedAnswer.CANNOT_TELL
        and row.bytes_per_token <= chosen.bytes_per_token
    ]
    if unclear:
        against = f"against {_describe(exact)}, {'; '.join(unclear)}"
        return None, f"Which type of the KV cache loses least cannot be told: {against}."
    text = f"Of the types of the KV cache use {_describe(chosen)}"
    fp8 = min((row for row in rows if row.is_fp8), key=_get_kld)
    if chosen.is_fp8:
        text += "; no other that passes loses less"
    else:
        change = describe_pair(_compare(chosen.name, fp8.name, pairs))
        text += f", which {change} against {_describe(fp8)}"
    if chosen.backends:
        text += f"; it is served with {' or '.join(chosen.backends)}"
    smallest = min(usable, key=_rank)
    if smallest.bytes_per_token * _SMALLER < chosen.bytes_per_token:
        text += f". The smallest that passes is {_describe(smallest)}"
    return chosen, f"{text}."


def _compare(candidate: str, base: str, pairs: Sequence[PairedResult]) -> PairedResult:
    """Find the comparison of two types; of scale 1.0, which is only compared against, turned."""
    named = {(pair.candidate, pair.base): pair for pair in pairs}
    if (candidate, base) in named:
        return named[candidate, base]
    found = named[base, candidate]
    turned = {PairedAnswer.BETTER: PairedAnswer.WORSE, PairedAnswer.WORSE: PairedAnswer.BETTER}
    answer = turned.get(found.answer, found.answer)
    update = {"candidate": candidate, "base": base, "answer": answer}
    return found.model_copy(update={**update, "difference": -found.difference})


def _get_kld(row: CacheResult) -> float:
    assert row.kld_mean is not None  # noqa: S101 -- of an emulated candidate
    return row.kld_mean


def _rank(row: CacheResult) -> tuple[float, float]:
    return row.bytes_per_token, _get_kld(row)


def _describe(row: CacheResult) -> str:
    kld = format_mean_kld(row.kld_mean, row.kld_se)
    return f"{row.name} ({row.bytes_per_token:,.0f} bytes a token, KLD {kld})"
