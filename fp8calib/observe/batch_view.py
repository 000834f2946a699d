"""Which tokens of a batch count, and which of them enter the histograms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from fp8calib.numerics.positions import split_positions

HISTOGRAM_SEQUENCES = 8
"""The stride of the sequences in histograms; amax and counts cover all sequences."""
INPUT_HISTOGRAM_TOKENS = 4
"""The stride of their tokens in histograms of inputs; histograms of K and V count all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Which tokens of a batch count, padded on the right.

    The rows of a batch are its tokens, sequence by sequence. Indices of rows are made once for each
    device. The sampled rows enter the histograms; they depend only on a sequence's global index and
    the positions in it, and most batches have none.
    """

    shape: tuple[int, int]
    """(B, S)."""
    lengths: tuple[int, ...]
    """The tokens of each sequence."""
    first: int
    """The global index of the first sequence."""
    _on_device: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """The number of tokens, without padding."""
        return sum(self.lengths)

    @property
    def num_rows(self) -> int:
        """The number of tokens, padding included."""
        return self.shape[0] * self.shape[1]

    @property
    def is_padded(self) -> bool:
        """Whether rows are padding."""
        return self.num_tokens != self.num_rows

    @property
    def spans(self) -> list[tuple[int, int]]:
        """The bounds of each range of positions."""
        return split_positions(self.shape[1])

    @property
    def has_samples(self) -> bool:
        """Whether rows enter the histograms."""
        return any(self._is_sampled(number) for number in range(len(self.lengths)))

    def padding(self, device: torch.device) -> torch.Tensor:
        """Tell which rows are padding: bool [B, S]."""
        return self._make(self._find_padding, device)

    def kv_sample(self, device: torch.device) -> torch.Tensor:
        """List the rows in histograms of K and V: int64 [N]."""
        return self._make(self._sample, device)

    def input_sample(self, device: torch.device) -> torch.Tensor:
        """List the rows in histograms of inputs: int64 [N]."""
        return self._make(self._sample_inputs, device)

    def places(self, device: torch.device) -> torch.Tensor:
        """Give the sequence and range of positions of each row, as b * R + r: int64 [B * S]."""
        return self._make(self._find_places, device)

    def _make(self, make: Callable[[], torch.Tensor], device: torch.device) -> torch.Tensor:
        key = (make.__name__, device)
        if key not in self._on_device:
            self._on_device[key] = make().to(device, non_blocking=True)
        return self._on_device[key]

    def _find_padding(self) -> torch.Tensor:
        return torch.arange(self.shape[1]) >= torch.tensor(self.lengths).unsqueeze(1)

    def _find_places(self) -> torch.Tensor:
        sizes = torch.tensor([stop - first for first, stop in self.spans])
        numbers = torch.arange(len(sizes)).repeat_interleave(sizes)
        return (torch.arange(self.shape[0]).unsqueeze(1) * len(sizes) + numbers).flatten()

    def _sample_inputs(self) -> torch.Tensor:
        return self._sample(INPUT_HISTOGRAM_TOKENS)

    def _sample(self, every: int = 1) -> torch.Tensor:
        parts = [
            torch.arange(0, length, every) + number * self.shape[1]
            for number, length in enumerate(self.lengths)
            if self._is_sampled(number)
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)

    def _is_sampled(self, number: int) -> bool:
        return (self.first + number) % HISTOGRAM_SEQUENCES == 0
