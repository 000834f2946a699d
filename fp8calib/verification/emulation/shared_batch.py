"""Several models in one batch: the unquantized one, and candidates of K, V and q."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fp8calib.data.sequences import Batch
from fp8calib.model.geometry import Attention, Role
from fp8calib.verification.emulation.candidate import Candidate, blaming
from fp8calib.verification.emulation.emulate import EmulationHooks


def can_share(candidate: Candidate) -> bool:
    """Whether a candidate changes nothing but K, V and q, whose rows lie behind one another.

    Rows of experts are sorted, and P is computed in tiles of a model's own attention.
    """
    is_plain = not (candidate.weights or candidate.reads or candidate.make_hooks)
    return is_plain and {site.role for site in candidate.quantizers} <= {Role.K, Role.V, Role.Q}


def repeat(batch: Batch, count: int) -> Batch:
    """Repeat the rows of a batch without media: all of the first model, then those of the next."""
    ids = batch.input_ids.repeat(count, 1)
    return replace(batch, input_ids=ids, lengths=batch.lengths * count)


class SharedHooks(EmulationHooks):
    """Gives the hooks of each model its rows of K, V and q."""

    def __init__(self, models: Sequence[EmulationHooks]) -> None:
        super().__init__(Candidate())
        self._models = models
        self.roles = frozenset[Role]().union(*(hooks.roles for hooks in models))

    def begin_batch(self, batch: Batch) -> None:
        """Open a batch of `repeat`, for each as if it were its own."""
        rows = len(batch.lengths) // len(self._models)
        own = replace(batch, input_ids=batch.input_ids[:rows], lengths=batch.lengths[:rows])
        for hooks in self._models:
            hooks.begin_batch(own)

    def end_batch(self) -> None:
        """Close it for each."""
        for hooks in self._models:
            hooks.end_batch()

    def on_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Quantize K and V of each model [B, H, S, D]."""
        keys, values = self._each(lambda hooks, k, v: hooks.on_kv(attention, k, v), key, value)
        return keys, values

    def on_query(self, attention: Attention, query: torch.Tensor) -> torch.Tensor:
        """Quantize q of each model [B, H, S, D]."""
        (queries,) = self._each(lambda hooks, q: (hooks.on_query(attention, q),), query)
        return queries

    def _each(
        self, call: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
    ) -> list[torch.Tensor]:
        count, made = len(self._models), []
        rows = zip(*(x.chunk(count) for x in tensors), strict=True)
        for hooks, own in zip(self._models, rows, strict=True):
            with blaming(hooks.candidate.name):
                made.append(call(hooks, *own))
        return [torch.cat(parts) for parts in zip(*made, strict=True)]
