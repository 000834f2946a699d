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
_ZEROS_AT_ONCE = 2**20
_ALIGNED = 4
"""Zeros begin at multiples of so many, which makes 16 bytes."""


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
    def sampled(self) -> list[int]:
        """The sequences of the batch that enter the histograms."""
        return [n for n in range(len(self.lengths)) if (self.first + n) % HISTOGRAM_SEQUENCES == 0]

    def padding(self, device: torch.device) -> torch.Tensor:
        """Tell which rows are padding: bool [B, S]."""

        def make() -> torch.Tensor:
            return torch.arange(self.shape[1]) >= torch.tensor(self.lengths).unsqueeze(1)

        return self._on(device, "padding", make)

    def places(self, device: torch.device) -> torch.Tensor:
        """Give the sequence and range of positions of each row, as b * R + r: int64 [B * S]."""

        def make() -> torch.Tensor:
            sizes = torch.tensor([stop - first for first, stop in self.spans])
            ranges = torch.arange(len(sizes)).repeat_interleave(sizes)
            return (torch.arange(self.shape[0]).unsqueeze(1) * len(sizes) + ranges).flatten()

        return self._on(device, "places", make)

    def sample(self, device: torch.device, stride: int = 1) -> torch.Tensor:
        """List the rows that enter the histograms, each `stride`-th of a sequence: int64 [N]."""

        def make() -> torch.Tensor:
            starts = ((n * self.shape[1], self.lengths[n]) for n in self.sampled)
            return torch.cat([torch.arange(at, at + length, stride) for at, length in starts])

        return self._on(device, f"every {stride}", make)

    def counted(self, device: torch.device) -> torch.Tensor:
        """Give how many rows of each sequence are no padding: int32 [B]."""
        return self._on(device, "counted", lambda: torch.tensor(self.lengths, dtype=torch.int32))

    def zeros(self, device: torch.device, size: int) -> torch.Tensor:
        """Give zeros of this batch alone, int32 [size], many of which are made in one kernel."""
        place, taken = ("zeros", device), -(-size // _ALIGNED) * _ALIGNED
        room = self._on_device.get(place)
        if room is None or len(room) < taken:
            room = torch.zeros(max(taken, _ZEROS_AT_ONCE), dtype=torch.int32, device=device)
        self._on_device[place] = room[taken:]
        return room[:size]

    def _on(
        self, device: torch.device, name: str, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if (name, device) not in self._on_device:
            self._on_device[name, device] = make().to(device, non_blocking=True)
        return self._on_device[name, device]
