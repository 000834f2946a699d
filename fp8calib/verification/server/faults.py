"""Faults of layers, on the first sequences: emulated, or stored by another machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import torch

from fp8calib.calibration import Progress
from fp8calib.data.plan import Batch, DataPlan
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.compare.comparison import Comparison, ComparisonResult, advance_once
from fp8calib.verification.sensitivity import LAYERS_AT_ONCE, choose_batches
from fp8calib.verification.server.hypotheses import (
    EmulatedFault,
    FaultEffect,
    has_kv_scales,
    list_layer_faults,
    lose_kv_scales,
    lose_query_scales,
)


def list_faults(candidates: Sequence[Candidate]) -> dict[str, EmulatedFault]:
    """List the faults that run beside the candidates: lost scales of q."""
    return {
        name: fault
        for candidate in candidates
        for name, fault in lose_query_scales(candidate.name, candidate.emulation).items()
    }


def changes_of(compared: ComparisonResult, name: str) -> torch.Tensor:
    """Give what a candidate changes: fp64 [N]."""
    return (compared.candidates[name].logprobs - compared.reference.logprobs).double()


class LayerFaults(Protocol):
    """Faults of candidates with KV scales: of single layers, and of K or V in all of them."""

    @property
    def bases(self) -> Sequence[str]:
        """The names of the candidates."""

    @property
    def num_sequences(self) -> int:
        """The number of sequences that faults are known on."""

    @property
    def num_tokens(self) -> int:
        """The number of their scored tokens."""

    def run(self, base: str, progress: Progress) -> Mapping[str, FaultEffect]:
        """Give the effects of the faults of the candidate `base`, by name."""


@dataclass(frozen=True, kw_only=True)
class FaultRunner:
    """Emulates them."""

    comparison: Comparison
    geometry: ModelGeometry
    candidates: Sequence[Candidate]
    plan: DataPlan
    batch_size: int

    @cached_property
    def bases(self) -> Sequence[str]:
        """The names of the candidates with KV scales."""
        return [one.name for one in self.candidates if has_kv_scales(one.emulation)]

    @cached_property
    def _batches(self) -> list[Batch]:
        return choose_batches(self.plan, self.batch_size)

    @property
    def num_sequences(self) -> int:
        """The number of sequences that faults run on."""
        return sum(len(batch.lengths) for batch in self._batches)

    @property
    def num_tokens(self) -> int:
        """The number of their scored tokens."""
        return sum(batch.num_tokens for batch in self._batches) - self.num_sequences

    def run(self, base: str, progress: Progress) -> dict[str, FaultEffect]:
        """Emulate the faults of the candidate `base`; give their effects."""
        emulation = next(one.emulation for one in self.candidates if one.name == base)
        faults = {
            **dict(list_layer_faults(base, emulation, self.geometry)),
            **lose_kv_scales(base, emulation),
        }
        names = list(faults)
        rounds = [names[i : i + LAYERS_AT_ONCE] for i in range(0, len(names), LAYERS_AT_ONCE)]
        tokens = sum(batch.num_tokens for batch in self._batches)
        progress.stage("faults of layers", tokens * (len(names) + len(rounds)), unit="tokens")
        advance = advance_once(self.comparison, progress.advance)
        effects: dict[str, FaultEffect] = {}
        for some in rounds:
            emulations = {name: faults[name].emulation for name in some}
            compared = self.comparison.run(self._batches, emulations, advance=advance)
            for name in some:
                effects[name] = faults[name].with_changes(changes_of(compared, name))
        return effects


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFaults:
    """Reads them from what another machine stored."""

    effects: Mapping[str, Mapping[str, FaultEffect]]
    """By candidate, then by name; all on the same tokens."""
    lengths: Sequence[int]
    """Scored tokens of every sequence of the text."""

    @property
    def bases(self) -> Sequence[str]:
        """The candidates whose faults are stored."""
        return list(self.effects)

    @property
    def num_sequences(self) -> int:
        """The number of sequences that the faults ran on."""
        return list(accumulate(self.lengths)).index(self.num_tokens) + 1

    @property
    def num_tokens(self) -> int:
        """The number of their scored tokens."""
        first = next(iter(self.effects.values()))
        return len(next(iter(first.values())).changes)

    def run(self, base: str, progress: Progress) -> Mapping[str, FaultEffect]:  # noqa: ARG002
        """Give what is stored."""
        return self.effects[base]
