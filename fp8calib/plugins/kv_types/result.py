"""What `kv-types` compared, and what it recommends."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fp8calib.commands.result import Result
from fp8calib.engines.facts.gpus import join_generations
from fp8calib.text import Table
from fp8calib.verification.figures import format_mean_kld, format_ratio, format_share
from fp8calib.verification.judge.decide import get_kld
from fp8calib.verification.judge.gates import GATES
from fp8calib.verification.report import (
    CandidateResult,
    PairedAnswer,
    PairedResult,
    Verdict,
    describe_pair,
)

FP8_TYPES = ("fp8", "fp8_e4m3")
"""Engines' names of the type with a scale for a tensor or a head, which is always compared."""
_SMALLER = 1.1
"""What needs less by a smaller factor is not called smaller: a scale for a token adds 6 %."""


class CacheResult(CandidateResult):
    """A KV cache beside the unquantized model, judged by the gate `kv`."""

    dtype: str
    """The value of `--kv-cache-dtype`."""
    bytes_per_token: float
    """In all layers and on all ranks."""
    tokens: int | None
    """How many fit into `--kv-memory`; None where that is not given."""
    backends: tuple[str, ...]
    """The engine's backends that store it, in its order of preference; empty where not known."""
    gpus: tuple[str, ...]
    """The generations of GPUs with such a backend, as compilers name them."""

    def __str__(self) -> str:
        kld = format_mean_kld(self.kld_mean, self.kld_se)
        return f"{self.name} ({self.bytes_per_token:,.0f} bytes a token, KLD {kld})"


class KvTypesResult(Result):
    """The types, the smallest first, and the one to serve."""

    model: str
    engine: str
    data: tuple[str, ...]
    tokens: int
    sequences: int
    dtype: str
    device: str
    types: tuple[CacheResult, ...]
    comparisons: tuple[PairedResult, ...]
    """All with all."""
    recommended: str
    """Empty where the text cannot tell."""
    why: str
    next: str
    """The command that serves the model with it; empty where none does."""
    warnings: tuple[str, ...]

    def make_table(self) -> Table:
        """Make the table of all types."""
        columns = {
            "type": [row.name for row in self.types],
            "verdict": [row.verdict.value for row in self.types],
            "KLD mean ± se": [format_mean_kld(row.kld_mean, row.kld_se) for row in self.types],
            "ratio ± se": [format_ratio(row.ppl_ratio, row.ppl_ratio_se) for row in self.types],
            "top-1": [format_share(row.top1_agreement) for row in self.types],
            "bytes a token": [f"{row.bytes_per_token:,.0f}" for row in self.types],
            "tokens that fit": [f"{row.tokens or 0:,}" for row in self.types],
            "GPUs": [join_generations(row.gpus) or "-" for row in self.types],
            "backends": [", ".join(row.backends) or "-" for row in self.types],
        }
        if all(row.tokens is None for row in self.types):
            del columns["tokens that fit"]
        return Table(
            title=f"KV caches in {self.engine}, emulated: {self.tokens:,} tokens in "
            f"{self.sequences} sequences, {self.dtype}",
            columns=list(columns),
            rows=list(zip(*columns.values(), strict=True)),
            words=(0, 1, len(columns) - 2, len(columns) - 1),
        )


def recommend(
    rows: Sequence[CacheResult], pairs: Sequence[PairedResult], *, tokens: int = 0
) -> tuple[CacheResult | None, str]:
    """Recommend the type that loses least; of equal losses, the one that needs least memory.

    None if the text cannot tell whether a type passes, or whether one that needs no more memory
    loses less; and why.

    Args:
        rows: the types, FP8 among them.
        pairs: the comparisons of all with all.
        tokens: how many were scored.
    """
    usable = [row for row in rows if row.verdict not in {Verdict.FAIL, Verdict.CANNOT_TELL}]
    if not usable:
        return None, _explain_none(rows, tokens)
    exact = min(usable, key=get_kld)
    rivals = [
        (row, _find_pair(row, exact, pairs))
        for row in usable
        if row is not exact and row.bytes_per_token <= exact.bytes_per_token
    ]
    same = [row for row, pair in rivals if pair.answer is PairedAnswer.NO_DIFFERENCE]
    chosen = min((exact, *same), key=_rank)
    unclear = [
        f"{row.name} {describe_pair(pair)}"
        for row, pair in rivals
        if pair.answer is PairedAnswer.CANNOT_TELL and row.bytes_per_token <= chosen.bytes_per_token
    ]
    if unclear:
        against = f"against {exact}, {'; '.join(unclear)}"
        return None, f"Which type of the KV cache loses least cannot be told: {against}."
    text = f"Of the types of the KV cache use {chosen}"
    if chosen.dtype in FP8_TYPES:
        text += "; no other that passes loses less"
    else:
        fp8 = min((row for row in rows if row.dtype in FP8_TYPES), key=get_kld)
        text += f", which {describe_pair(_find_pair(chosen, fp8, pairs))} against {fp8}"
    if chosen.backends:
        text += f"; it is served with {' or '.join(chosen.backends)}"
    smallest = min(usable, key=_rank)
    if smallest.bytes_per_token * _SMALLER < chosen.bytes_per_token:
        text += f". The smallest that passes is {smallest}"
    return chosen, f"{text}."


def _explain_none(rows: Sequence[CacheResult], tokens: int) -> str:
    """Say why no type is usable: all fail, or so little text cannot tell, and how much would."""
    unknown = [row for row in rows if row.verdict is Verdict.CANNOT_TELL]
    if not unknown:
        return "No type of the KV cache passes."
    best, more = min(unknown, key=get_kld), ""
    if tokens and best.ppl_ratio_se is not None:
        # The errors of `judge`: both shrink with the square root of the text.
        implied = math.sqrt(2 * get_kld(best) / tokens)
        error = max(best.ppl_ratio_se / best.ppl_ratio, implied)
        needed = tokens * (error / GATES[best.gate].margin) ** 2
        more = f"; about {float(f'{needed:.2g}'):,.0f} tokens would tell" * (needed > tokens)
    return (
        "Whether a type of the KV cache passes cannot be told. Of the smallest KLD is "
        f"{best}: {best.verdict_why}{more}."
    )


def _rank(row: CacheResult) -> tuple[float, float]:
    return row.bytes_per_token, get_kld(row)


def _find_pair(
    candidate: CacheResult, base: CacheResult, pairs: Sequence[PairedResult]
) -> PairedResult:
    """Find the comparison of two types."""
    named = {(pair.candidate, pair.base): pair for pair in pairs}
    if pair := named.get((candidate.name, base.name)):
        return pair
    # Scale 1.0 is the base of its comparisons only. It is turned where the text tells nothing.
    pair = named[base.name, candidate.name]
    return pair.model_copy(update={"difference": -pair.difference})
