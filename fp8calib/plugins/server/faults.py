"""Faults of scales, emulated on the first sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from fp8calib.calibration.progress import Progress
from fp8calib.calibration.streamed_model import StreamedModel
from fp8calib.data.sequences import Batch, DataPlan, batches
from fp8calib.model.prepared import PreparedModel
from fp8calib.plugins.server.hypotheses import (
    Fault,
    has_scaled_kv,
    list_layer_faults,
    lose_kv_scales,
    lose_query_scales,
    mix_up_scales,
)
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.score import Scores, count_in_rounds, score_in_rounds

SEQUENCES = 8
"""Answers are asked for again, and faults emulated, on at most so many sequences."""
_MOST_TIMES = 10
"""Faults together run over at most so many times the tokens of the text..."""
_LEAST_TOKENS = 512
"""...unless each then has fewer tokens than it can be told by."""


def list_faults(candidates: Sequence[Candidate]) -> dict[str, Fault]:
    """List the faults that run beside the candidates: lost scales of q."""
    return {
        name: fault
        for candidate in candidates
        for name, fault in lose_query_scales(candidate.name, candidate).items()
    }


def changes_of(compared: Scores, name: str) -> torch.Tensor:
    """Give what a candidate changes: fp64 [N]."""
    return (compared.candidates[name].logprobs - compared.reference.logprobs).double()


@dataclass(frozen=True, kw_only=True)
class FaultRunner:
    """Emulates faults of candidates with KV scales: of single layers, and of all of them."""

    model: PreparedModel | StreamedModel
    candidates: Sequence[Candidate]
    plan: DataPlan
    batch_size: int
    progress: Progress

    @cached_property
    def bases(self) -> Sequence[str]:
        """The names of the candidates with KV scales."""
        return [one.name for one in self.candidates if has_scaled_kv(one)]

    @cached_property
    def _text(self) -> Sequence[Batch]:
        """Choose the first batches, as many as `_MOST_TIMES` allows."""
        passes = max((count_in_rounds(len(self.faults_of(base))) for base in self.bases), default=0)
        most = max(_MOST_TIMES * self.plan.num_tokens // max(passes, 1), _LEAST_TOKENS)
        chosen: list[Batch] = []
        for batch in batches(self.plan, self.batch_size):
            if batch.first >= SEQUENCES:
                break
            chosen.append(batch)
            if sum(each.num_tokens for each in chosen) >= most:
                break
        return chosen

    @property
    def num_sequences(self) -> int:
        """The number of sequences that faults run on."""
        return sum(len(batch.lengths) for batch in self._text)

    @property
    def num_tokens(self) -> int:
        """The number of their scored tokens."""
        return sum(batch.num_tokens for batch in self._text) - self.num_sequences

    def run_whole(self, faults: Mapping[str, Fault]) -> dict[str, torch.Tensor]:
        """Emulate those of all layers; give the changes of each: fp64 [N]."""
        found = {name: each for name, each in faults.items() if each.layer is None}
        return self._run(found, "faults of all layers")

    def run_layers(self, faults: Mapping[str, Fault]) -> dict[str, torch.Tensor]:
        """Emulate those of single layers; give the changes of each: fp64 [N]."""
        found = {name: each for name, each in faults.items() if each.layer is not None}
        return self._run(found, f"{len(found)} faults of single layers")

    def faults_of(self, base: str) -> dict[str, Fault]:
        """List the faults of a candidate, by their names."""
        emulation = next(one for one in self.candidates if one.name == base)
        return {
            **list_layer_faults(base, emulation, self.model.geometry),
            **lose_kv_scales(base, emulation),
            **mix_up_scales(base, emulation, self.model.geometry),
        }

    def _run(self, faults: Mapping[str, Fault], stage: str) -> dict[str, torch.Tensor]:
        passes = count_in_rounds(len(faults))
        tokens = sum(batch.num_tokens for batch in self._text)
        times = tokens * passes / self.plan.num_tokens
        rounds = score_in_rounds(
            self.model,
            [replace(fault.emulation, name=name) for name, fault in faults.items()],
            self._text,
            progress=self.progress,
            stage=f"{stage}, {times:.1f} times the text",
        )
        return {
            name: changes_of(compared, name) for compared in rounds for name in compared.candidates
        }
