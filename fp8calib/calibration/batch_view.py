"""Which tokens of a batch count.

Letters in shapes: B sequences, S tokens, N rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from fp8calib.numerics.positions import split_positions

HISTOGRAM_SEQUENCES = 8
"""The stride of the sequences in histograms; amax and counts cover all sequences."""
INPUT_HISTOGRAM_TOKENS = 4
"""The stride of tokens in histograms of inputs; histograms of K and V count all tokens."""
_ZEROS_AT_ONCE = 2**20
_ALIGNED = 4  # int32 elements: every call's zeros begin at a multiple of 16 bytes


class BatchView:
    """Which tokens of a right-padded batch count, and which of them enter the histograms.

    The rows of a batch are its tokens, sequence by sequence, with padding. Which rows enter the
    histograms depends only on the global index of their sequence and on their position, so that
    the batch size changes nothing. Tensors of rows are made once for each device.

    Attributes:
        shape: (B, S).
        lengths: the number of tokens of each sequence, without padding.
        first: the global index of the first sequence.
        num_tokens: the number of tokens, without padding.
        num_rows: the number of tokens, padding included.
        is_padded: whether any sequence is.
        spans: the bounds of each range of positions.
        sampled: the sequences of the batch that enter the histograms.
    """

    def __init__(self, shape: Sequence[int], lengths: tuple[int, ...], first: int) -> None:
        self.shape, self.lengths, self.first = tuple(shape), lengths, first
        self.num_tokens, self.num_rows = sum(lengths), shape[0] * shape[1]
        self.is_padded = self.num_tokens != self.num_rows
        self.spans = split_positions(shape[1])
        sequences = range(len(lengths))
        self.sampled = [n for n in sequences if (first + n) % HISTOGRAM_SEQUENCES == 0]
        self._on_device: dict[tuple[str, torch.device], torch.Tensor] = {}

    def padding(self, device: torch.device) -> torch.Tensor:
        """Mark padding: bool [B, S]."""
        lengths = torch.tensor(self.lengths).unsqueeze(1)
        return self._on(device, "padding", lambda: torch.arange(self.shape[1]) >= lengths)

    def sample(self, device: torch.device, stride: int) -> torch.Tensor:
        """List the rows that enter the histograms, every `stride`-th of a sequence: int64 [N]."""
        starts = [(n * self.shape[1], self.lengths[n]) for n in self.sampled]
        rows = (torch.arange(start, start + length, stride) for start, length in starts)
        return self._on(device, f"every {stride}", lambda: torch.cat(list(rows)))

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        """Give `lengths` as a tensor: int32 [B]."""
        return self._on(device, "lengths", lambda: torch.tensor(self.lengths, dtype=torch.int32))

    def zeros(self, device: torch.device, size: int) -> torch.Tensor:
        """Give zeros that nothing else uses: int32 [size]. One kernel fills those of many calls."""
        taken = -(-size // _ALIGNED) * _ALIGNED
        room = self._on_device.get(("zeros", device))
        if room is None or len(room) < taken:
            room = torch.zeros(max(taken, _ZEROS_AT_ONCE), dtype=torch.int32, device=device)
        self._on_device["zeros", device] = room[taken:]
        return room[:size]

    def _on(
        self, device: torch.device, name: str, make: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if (name, device) not in self._on_device:
            self._on_device[name, device] = make().to(device, non_blocking=True)
        return self._on_device[name, device]
