"""What every comparison of a model with its emulations does: score batches, collect the results."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from fp8calib.data.sequences import Batch
from fp8calib.errors import ModelError, VerificationError
from fp8calib.geometry.sites import Site
from fp8calib.model.load import LoadedModel
from fp8calib.verification.compare.token_scores import (
    Logits,
    TokenScores,
    join_scores,
    score_batch,
    split_sequences,
)
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks
from fp8calib.verification.emulation.fake_quantize import ScaleRange

_REFERENCE = "the unquantized model"
_OVERFLOW = "float16 overflows at 65504: try --dtype bfloat16 or float32"
_NO_OVERFLOW = {
    True: "the logits are NaN or inf before anything is quantized: are the model's files damaged?",
    False: "quantization turned finite numbers into them: look at its scales (`fp8calib show`)",
}


Advance = Callable[[int], None]
"""Receives the number of tokens that went through a model, or through a layer of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonResult:
    """Scores of the reference and of every candidate, and what quantization did to tensors."""

    reference: TokenScores
    candidates: dict[str, TokenScores]
    damage: dict[str, dict[Site, torch.Tensor]]
    """Candidate -> site -> sums of `measure_damage`, on the CPU."""
    weight_scales: dict[str, dict[Site, ScaleRange]]
    """Candidate -> weight -> the scales it was quantized with."""


class Comparison(Protocol):
    """Compares the unquantized model with its emulations."""

    @property
    def num_layers(self) -> int:
        """The layers that all tokens go through one after the other; 0 where they do not."""

    def run(
        self,
        batches: Iterable[Batch],
        emulations: Mapping[str, Emulation],
        *,
        reference_hooks: EmulationHooks | None = None,
        watched: Sequence[torch.Tensor] | None = None,
        advance: Advance,
    ) -> ComparisonResult:
        """Score every candidate (`emulations`, by name) on every batch.

        `reference_hooks` measure tensors of the unquantized model without changing them. `watched`
        holds, for each sequence, tokens [L - 1, W] whose log-probabilities by the unquantized model
        are kept (`TokenScores.watched`).

        Raises:
            VerificationError: a model gives NaN or inf; the message names it and the sample.
        """


def advance_once(comparison: Comparison, advance: Advance) -> Advance:
    """Count tokens once, also where they are counted in every layer."""
    return advance_by_share(max(comparison.num_layers, 1), advance)


def advance_by_share(share: int, advance: Advance) -> Advance:
    """Count tokens once that are counted `share` times."""
    done = 0

    def advance_share(tokens: int) -> None:
        nonlocal done
        before, done = done, done + tokens
        advance(done // share - before // share)

    return advance_share


@contextmanager
def blaming(candidate: str) -> Iterator[None]:
    """Note on an error which candidate it is about."""
    try:
        yield
    except (ModelError, VerificationError) as error:
        error.candidate = candidate
        raise


class ScoreCollector:
    """Scores the batches of a comparison, the reference first, then each candidate."""

    def __init__(
        self,
        model: LoadedModel,
        emulations: Mapping[str, Emulation],
        watched: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._watched = watched
        self._names = tuple(emulations)
        self._dtype = model.dtype
        self._scores: list[list[TokenScores]] = []
        self.vocab_size = int(model.config.get_text_config(decoder=True).vocab_size)

    def add(self, batch: Batch, hidden: Sequence[torch.Tensor], logits: Logits) -> None:
        """Score one batch by the last hidden state [B, S, C] of every model.

        Raises:
            VerificationError: a score is NaN or inf; the message names the model and the sample.
        """
        reference, *others = hidden
        scores = score_batch(
            batch, reference, others, logits, self.vocab_size, self._find_watched(batch)
        )
        for name, found in zip((_REFERENCE, *self._names), scores, strict=True):
            with blaming(name):
                _require_finite(name, found, batch, self._dtype)
        self._scores.append(scores)

    def _find_watched(self, batch: Batch) -> torch.Tensor | None:
        if self._watched is None:
            return None
        return torch.cat(list(self._watched[batch.first : batch.first + len(batch.lengths)]))

    def finish(self, hooks: Sequence[EmulationHooks]) -> ComparisonResult:
        """Join the scores of all batches with what was measured in each candidate."""
        reference, *candidates = (join_scores(parts) for parts in zip(*self._scores, strict=True))
        damage = [{site: sums.cpu() for site, sums in each.damage.items()} for each in hooks]
        return ComparisonResult(
            reference=reference,
            candidates=dict(zip(self._names, candidates, strict=True)),
            damage=dict(zip(self._names, damage, strict=True)),
            weight_scales=dict(
                zip(self._names, (each.weight_scales for each in hooks), strict=True)
            ),
        )


def _require_finite(name: str, scores: TokenScores, batch: Batch, dtype: torch.dtype) -> None:
    good = scores.logprobs.isfinite() & scores.klds.isfinite()
    if bool(good.all()):
        return
    parts = enumerate(split_sequences(good, batch.scored_lengths), start=batch.first)
    sample = next(number for number, part in parts if not bool(part.all()))
    raise VerificationError(
        f"{name}: NaN or inf in the logits at sample {sample} (counting from 0)",
        hint=_OVERFLOW if dtype is torch.float16 else _NO_OVERFLOW[name == _REFERENCE],
    )
