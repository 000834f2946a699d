"""Taps that leave the model as it is, and measure what scales would do to its K and V."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.data.plan import Batch
from fp8calib.geometry.model_geometry import Attention
from fp8calib.geometry.sites import Role, Site
from fp8calib.verify.emulate import EmulatingTaps
from fp8calib.verify.quantizer import Quantizer, add_damage

SEQUENCE_STRIDE = 4
"""Every how many sequences one is looked at."""


class LookingTaps(EmulatingTaps):
    """Measures each kind of scales on the same tensors; what goes on is unquantized."""

    def __init__(self, kinds: Mapping[str, Mapping[Site, Quantizer]]) -> None:
        super().__init__({})
        self._kinds = kinds
        self._is_looking = False
        self.found: dict[tuple[str, Site], torch.Tensor] = {}

    def begin_batch(self, batch: Batch) -> None:
        """Open a batch; look at it when one of the chosen sequences is in it."""
        super().begin_batch(batch)
        sequences = range(batch.first, batch.first + len(batch.lengths))
        self._is_looking = any(index % SEQUENCE_STRIDE == 0 for index in sequences)

    def tap_kv(
        self, attention: Attention, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Measure K and V under every kind of scales."""
        for role, x in ((Role.K, key), (Role.V, value)) if self._is_looking else ():
            site = attention.site(role)
            for kind, quantizers in self._kinds.items():
                if (quantizer := quantizers.get(site)) is not None:
                    damage = self.measure_heads(quantizer, x)[1]
                    self.found[kind, site] = add_damage(self.found.get((kind, site)), damage)
        return key, value
