"""Compare a model that is in memory whole with its emulations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from fp8calib.data.sequences import Batch
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.machine.allocator import keep_freed_memory, return_freed_memory
from fp8calib.model.load import LoadedModel
from fp8calib.run.forward.decoder import Decoder
from fp8calib.run.forward.lm_head import open_lm_head
from fp8calib.verification.compare.comparison import (
    Advance,
    ComparisonResult,
    ScoreCollector,
    blaming,
)
from fp8calib.verification.emulation.decoding import make_hooks
from fp8calib.verification.emulation.emulate import Emulation, EmulationHooks, emulated
from fp8calib.verification.emulation.weights import ParameterReader

_HIDDEN_SHARE = 6
"""Hidden states that wait for the head may take this part of the weights' memory: 1/6."""


class WholeComparison:
    """Runs batches through the unquantized model and its emulations.

    Candidates that change weights change them once for a group of batches, whose hidden states
    wait; the group's size keeps these a small part of the memory the weights take.
    """

    def __init__(
        self, model: LoadedModel, geometry: ModelGeometry, originals: ParameterReader
    ) -> None:
        self._model = model
        self._decoder = Decoder(model)
        self._geometry = geometry
        self._originals = originals

    @property
    def num_layers(self) -> int:
        """None: a batch runs through the whole model."""
        return 0

    def run(
        self,
        batches: Iterable[Batch],
        emulations: Mapping[str, Emulation],
        *,
        reference_hooks: EmulationHooks | None = None,
        watched: Sequence[torch.Tensor] | None = None,
        advance: Advance,
    ) -> ComparisonResult:
        """Score every candidate on every batch (`Comparison.run`)."""
        keep_freed_memory()
        hooks = [make_hooks(emulation) for emulation in emulations.values()]
        models = [
            ("", Emulation(), reference_hooks or EmulationHooks({})),
            *zip(emulations, emulations.values(), hooks, strict=True),
        ]
        scores = ScoreCollector(self._model, emulations, watched)
        for group in self._groups(batches, emulations):
            hidden = [list(self._run_group(group, *each, advance)) for each in models]
            if len(group) > 1:  # the scores of a batch alone leave no holes worth the time
                return_freed_memory()
            with open_lm_head(self._model) as head:
                for batch, states in zip(group, zip(*hidden, strict=True), strict=True):
                    scores.add(batch, states, head.logits)
        return scores.finish(hooks)

    def _run_group(
        self,
        group: Sequence[Batch],
        name: str,
        emulation: Emulation,
        hooks: EmulationHooks,
        advance: Advance,
    ) -> Iterator[torch.Tensor]:
        """Run batches under one emulation; give the last hidden state [B, S, C] of each."""
        with (
            blaming(name),
            emulated(
                *(self._model, self._geometry, emulation, hooks),
                originals=self._originals,
                decoder=self._decoder,
            ) as run,
        ):
            for batch in group:
                yield run(batch)
                advance(batch.num_tokens)

    def _groups(
        self, batches: Iterable[Batch], emulations: Mapping[str, Emulation]
    ) -> Iterator[list[Batch]]:
        if not any(emulation.weights for emulation in emulations.values()):
            yield from ([batch] for batch in batches)
            return
        limit = self._tokens_at_once(len(emulations) + 1)
        group: list[Batch] = []
        for batch in batches:
            if group and sum(b.input_ids.numel() for b in group) + batch.input_ids.numel() > limit:
                yield group
                group = []
            group.append(batch)
        if group:
            yield group

    def _tokens_at_once(self, num_models: int) -> int:
        weights = sum(p.numel() * p.element_size() for p in self._model.parameters())
        config = self._model.config.get_text_config(decoder=True)
        per_token = config.hidden_size * self._model.dtype.itemsize * num_models
        return int(weights // _HIDDEN_SHARE // per_token)
