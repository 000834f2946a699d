"""Run emulations on one text: together, or many of them a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch

from fp8calib.data.sequences import Batch
from fp8calib.machine.progress import Progress
from fp8calib.verification.compare.comparison import (
    Comparison,
    ComparisonResult,
    advance_by_share,
    advance_once,
)
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks

T = TypeVar("T")
AT_ONCE = 8
"""Emulations of a round: their hidden states wait for the head together, and every round runs the
unquantized model again."""


def split_rounds(names: Sequence[T]) -> list[Sequence[T]]:
    """Split the names of emulations into rounds."""
    return [names[start : start + AT_ONCE] for start in range(0, len(names), AT_ONCE)]


def count_in_rounds(num_emulations: int) -> int:
    """Count the passes over a text that emulations take in rounds, with the unquantized model's."""
    return num_emulations + -(-num_emulations // AT_ONCE)


def fit_in_rounds(passes: float) -> int:
    """Count the emulations that at most so many passes run in rounds."""
    return int(passes) * AT_ONCE // (AT_ONCE + 1)


class TextRuns:
    """Runs emulations on one text, and beside them the unquantized model."""

    def __init__(
        self, comparison: Comparison, batches: Sequence[Batch], progress: Progress
    ) -> None:
        self.batches = batches
        self.lengths = [length for batch in batches for length in batch.scored_lengths]
        """Of each sequence: one more than its tokens that are scored."""
        self.num_tokens = sum(batch.num_tokens for batch in batches)
        self._comparison = comparison
        self._progress = progress

    def run_stage(
        self,
        name: str,
        emulations: Mapping[str, Emulation],
        *,
        reference_hooks: EmulationHooks | None = None,
        watched: Sequence[torch.Tensor] | None = None,
    ) -> ComparisonResult:
        """Run emulations together, as a stage of its own: progress counts every layer."""
        layers = self._comparison.num_layers
        self._progress.stage(
            name,
            self.num_tokens * max(layers, 1),
            unit="tokens",
            layers=layers,
            batches=0 if layers else len(self.batches),
        )
        return self._comparison.run(
            self.batches,
            emulations,
            reference_hooks=reference_hooks,
            watched=watched,
            advance=advance_by_share(len(emulations) + 1, self._progress.advance),
        )

    def begin_stage(self, name: str, num_passes: int) -> None:
        """Begin a stage of so many passes, each counted once whatever its layers are."""
        self._progress.stage(name, self.num_tokens * num_passes, unit="tokens")

    def run(self, emulations: Mapping[str, Emulation]) -> ComparisonResult:
        """Run emulations together, as a part of a stage."""
        advance = advance_once(self._comparison, self._progress.advance)
        return self._comparison.run(self.batches, emulations, advance=advance)

    def run_rounds(self, emulations: Mapping[str, Emulation]) -> Iterator[ComparisonResult]:
        """Run `AT_ONCE` emulations at a time, as a part of a stage."""
        for names in split_rounds(list(emulations)):
            yield self.run({name: emulations[name] for name in names})
