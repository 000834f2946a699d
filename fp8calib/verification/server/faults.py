"""Emulate faults of single layers beside the candidates, on the first sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from fp8calib.calibration import Progress
from fp8calib.data.plan import Batch, DataPlan
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.verification.candidates import Candidate
from fp8calib.verification.compare.comparison import Comparison, ComparisonResult
from fp8calib.verification.sensitivity import LAYERS_AT_ONCE, choose_batches
from fp8calib.verification.server.diagnose import Changes, LayerEffect
from fp8calib.verification.server.hypotheses import (
    Fault,
    has_kv_scales,
    list_layer_faults,
    lose_query_scales,
)


def list_faults(candidates: Sequence[Candidate]) -> dict[str, Fault]:
    """List the faults that run beside the candidates: those that concern all layers."""
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
    """Runs faults of single layers of a candidate."""

    comparison: Comparison
    geometry: ModelGeometry
    candidates: Sequence[Candidate]
    plan: DataPlan
    batch_size: int

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

    def choose_base(self, changes: Changes) -> Candidate | None:
        """Choose the candidate with KV scales that comes closest to the server."""
        scaled = [candidate for candidate in self.candidates if has_kv_scales(candidate.emulation)]
        return max(scaled, key=lambda one: changes.fit(one.name).correlation or 0.0, default=None)

    def run(
        self, base: Candidate, progress: Progress
    ) -> tuple[dict[str, Fault], dict[str, LayerEffect]]:
        """Emulate the faults of single layers of `base`; give them and their effects, by name."""
        faults = dict(list_layer_faults(base.name, base.emulation, self.geometry))
        names = list(faults)
        rounds = [names[i : i + LAYERS_AT_ONCE] for i in range(0, len(names), LAYERS_AT_ONCE)]
        tokens = sum(batch.num_tokens for batch in self._batches)
        progress.stage("faults of layers", tokens * (len(names) + len(rounds)), unit="tokens")
        effects: dict[str, LayerEffect] = {}
        for some in rounds:
            emulations = {name: faults[name].emulation for name in some}
            compared = self.comparison.run(self._batches, emulations, advance=progress.advance)
            for name in some:
                fault, changes = faults[name], changes_of(compared, name)
                assert fault.layer is not None  # noqa: S101 -- `list_layer_faults`
                effects[name] = LayerEffect(
                    layer=fault.layer, is_lost=fault.is_lost, changes=changes
                )
        return faults, effects
