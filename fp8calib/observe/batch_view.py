"""Which tokens of a batch count, and which of them enter the histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from fp8calib.stats.positions import split_positions

HISTOGRAM_SEQUENCES = 8
"""The stride of the sequences in histograms; amax and counts cover all sequences."""
INPUT_HISTOGRAM_TOKENS = 4
"""The stride of their tokens in histograms of inputs; histograms of K and V count all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchView:
    """Which tokens of a batch count.

    Rows are the tokens of the batch, sequence by sequence. The sampled rows enter the histograms;
    they depend only on a sequence's global index and the positions in it, and most batches have
    none.
    """

    shape: tuple[int, int]
    """(B, S)."""
    first: int
    """The global index of the first sequence."""
    num_tokens: int
    quarter: int
    kept: torch.Tensor | None
    """The rows that are no padding, sorted by range of positions; None if all are kept."""
    spans: tuple[tuple[int, int], ...]
    """The bounds of each range of positions: in `kept`, or in every sequence if that is None."""
    kv_sample: torch.Tensor
    input_sample: torch.Tensor
    _on_device: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        """The number of tokens in the batch, padding included."""
        return self.shape[0] * self.shape[1]

    @property
    def all_ranges(self) -> torch.Tensor:
        """The range of positions of every row, padding included: int64 [B * S]."""
        sizes = [stop - first for first, stop in split_positions(self.shape[1])]
        return torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes)).repeat(self.shape[0])

    @property
    def ranges(self) -> torch.Tensor:
        """The range of positions of every row that counts: int64 [N]."""
        return self.all_ranges if self.kept is None else self.all_ranges[self.kept]

    @property
    def sampling_stride(self) -> int:
        """The stride of sampled rows, where the sequences of rows are not known."""
        return max(self.num_rows // max(len(self.input_sample), 1), 1)

    def rows(self, which: str, device: torch.device) -> torch.Tensor:
        """Give an index list, moved to `device` once."""
        key = (which, device)
        if key not in self._on_device:
            index: torch.Tensor = getattr(self, which)
            self._on_device[key] = index.to(device, non_blocking=True)
        return self._on_device[key]


def view_batch(
    shape: tuple[int, int],
    lengths: tuple[int, ...],
    first: int,
    quarter: int,
) -> BatchView:
    """Find which rows of a right-padded batch count.

    Args:
        shape: (B, S) of the batch.
        lengths: tokens of each sequence.
        first: global index of the batch's first sequence.
        quarter: which quarter of the data the batch belongs to.
    """
    kept = None
    spans = split_positions(max(lengths))
    if any(length != shape[1] for length in lengths):
        parts = [_rows(shape, lengths, range(len(lengths)), *span) for span in spans]
        kept = torch.cat(parts)
        ends = list(accumulate(map(len, parts)))
        spans = list(zip([0, *ends[:-1]], ends, strict=True))
    sampled = [i for i in range(len(lengths)) if (first + i) % HISTOGRAM_SEQUENCES == 0]
    return BatchView(
        shape=shape,
        first=first,
        num_tokens=sum(lengths),
        quarter=quarter,
        kept=kept,
        spans=tuple(spans),
        kv_sample=_rows(shape, lengths, sampled),
        input_sample=_rows(shape, lengths, sampled, every=INPUT_HISTOGRAM_TOKENS),
    )


def _rows(
    shape: tuple[int, int],
    lengths: tuple[int, ...],
    sequences: Sequence[int],
    first: int = 0,
    stop: int | None = None,
    *,
    every: int = 1,
) -> torch.Tensor:
    ends = [lengths[i] if stop is None else min(stop, lengths[i]) for i in sequences]
    parts = [
        torch.arange(first, max(end, first), every) + i * shape[1]
        for i, end in zip(sequences, ends, strict=True)
    ]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)
