"""Faults of scales, emulated on the first sequences."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp8calib.data.sequences import Batch, DataPlan
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.machine.progress import Progress
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.compare.comparison import Comparison, ComparisonResult, advance_once
from fp8calib.verification.sensitivity import LAYERS_AT_ONCE, choose_batches
from fp8calib.verification.server.hypotheses import (
    EmulatedFault,
    FaultEffect,
    has_scaled_kv,
    list_layer_faults,
    lose_kv_scales,
    lose_query_scales,
    mix_up_scales,
)

_MOST_TIMES = 10
"""Faults together run over at most so many times the tokens of the text..."""
_LEAST_TOKENS = 512
"""...unless each then has fewer tokens than it can be told by."""


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


@dataclass(frozen=True, kw_only=True)
class FaultRunner:
    """Emulates faults of candidates with KV scales: of single layers, and of all of them."""

    comparison: Comparison
    geometry: ModelGeometry
    candidates: Sequence[Candidate]
    plan: DataPlan
    batch_size: int

    @cached_property
    def bases(self) -> Sequence[str]:
        """The names of the candidates with KV scales."""
        return [one.name for one in self.candidates if has_scaled_kv(one.emulation)]

    @cached_property
    def _batches(self) -> list[Batch]:
        """Choose the first batches, as many as `_MOST_TIMES` allows."""
        runs = max((_count_runs(self._list(base)) for base in self.bases), default=0)
        most = max(_MOST_TIMES * sum(map(len, self.plan.sequences)) // max(runs, 1), _LEAST_TOKENS)
        chosen: list[Batch] = []
        for batch in choose_batches(self.plan, self.batch_size):
            chosen.append(batch)
            if sum(each.num_tokens for each in chosen) >= most:
                break
        return chosen

    @property
    def num_sequences(self) -> int:
        """The number of sequences that faults run on."""
        return sum(len(batch.lengths) for batch in self._batches)

    @property
    def num_tokens(self) -> int:
        """The number of their scored tokens."""
        return sum(batch.num_tokens for batch in self._batches) - self.num_sequences

    def run_whole(self, base: str, progress: Progress) -> dict[str, FaultEffect]:
        """Emulate the faults of all layers."""
        found = {n: each for n, each in self._list(base).items() if each.layer is None}
        return self._run(found, "faults of all layers", progress)

    def run_layers(self, base: str, progress: Progress) -> dict[str, FaultEffect]:
        """Emulate the faults of single layers."""
        found = {n: each for n, each in self._list(base).items() if each.layer is not None}
        return self._run(found, f"{len(found)} faults of single layers", progress)

    def _list(self, base: str) -> dict[str, EmulatedFault]:
        emulation = next(one.emulation for one in self.candidates if one.name == base)
        return {
            **dict(list_layer_faults(base, emulation, self.geometry)),
            **lose_kv_scales(base, emulation),
            **mix_up_scales(base, emulation, self.geometry),
        }

    def _run(
        self, faults: Mapping[str, EmulatedFault], stage: str, progress: Progress
    ) -> dict[str, FaultEffect]:
        names = list(faults)
        rounds = [names[i : i + LAYERS_AT_ONCE] for i in range(0, len(names), LAYERS_AT_ONCE)]
        tokens = sum(batch.num_tokens for batch in self._batches) * _count_runs(names)
        times = tokens / sum(map(len, self.plan.sequences))
        progress.stage(f"{stage}, {times:.1f} times the text", tokens, unit="tokens")
        advance = advance_once(self.comparison, progress.advance)
        effects: dict[str, FaultEffect] = {}
        for some in rounds:
            emulations = {name: faults[name].emulation for name in some}
            compared = self.comparison.run(self._batches, emulations, advance=advance)
            for name in some:
                effects[name] = faults[name].with_changes(changes_of(compared, name))
        return effects


def _count_runs(faults: Collection[str]) -> int:
    """Count the passes over a batch: one for each fault, and the reference in each round."""
    return len(faults) + math.ceil(len(faults) / LAYERS_AT_ONCE)
