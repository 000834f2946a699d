"""Which tokens of a batch count, and which of them enter the histograms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch

from fp8calib.stats.positions import split_positions

HISTOGRAM_SEQUENCES = 8
"""The stride of the sequences in histograms; amax and counts cover all sequences."""
INPUT_HISTOGRAM_TOKENS = 4
"""The stride of their tokens in histograms of inputs; histograms of K and V count all tokens."""


_MOST_RUNS = 8
"""With more runs of one modality, rows are gathered instead, which copies them."""


class Segment(NamedTuple):
    """Rows of one modality in one range of positions, among those that count."""

    span: int
    kind: int
    """Its index in `MODALITIES`."""
    rows: slice | torch.Tensor


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
    kinds: torch.Tensor | None = None
    """The index in `MODALITIES` of every row, padding included: int64 [B * S]; None in a run of
    text alone."""
    segments: tuple[Segment, ...]
    """A batch of text has one in each range of positions. A row with media is a batch of its own.
    """
    _on_device: dict[tuple[str | int, torch.device], torch.Tensor] = field(default_factory=dict)

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

    def rows(self, which: str | int, device: torch.device) -> torch.Tensor:
        """Give an index list, or that of a segment by its number, moved to `device` once."""
        key = (which, device)
        if key not in self._on_device:
            index: Any = (
                self.segments[which].rows if isinstance(which, int) else getattr(self, which)
            )
            self._on_device[key] = index.to(device, non_blocking=True)
        return self._on_device[key]

    @property
    def is_first_range_of_text(self) -> bool:
        """Whether it has one segment, of the first range and modality."""
        return [segment[:2] for segment in self.segments] == [(0, 0)]

    @property
    def segment_spans(self) -> torch.Tensor:
        """The range of positions of every segment: int64."""
        return torch.tensor([segment.span for segment in self.segments])

    @property
    def segment_kinds(self) -> torch.Tensor:
        """The modality of every segment: int64."""
        return torch.tensor([segment.kind for segment in self.segments])

    def list_rows(self, device: torch.device) -> list[slice | torch.Tensor]:
        """Give the rows of every segment: slices, or index lists on `device`."""
        return [
            segment.rows if isinstance(segment.rows, slice) else self.rows(index, device)
            for index, segment in enumerate(self.segments)
        ]


def view_batch(
    shape: tuple[int, int],
    lengths: tuple[int, ...],
    first: int,
    quarter: int,
    kinds: torch.Tensor | None = None,
) -> BatchView:
    """Find which rows of a right-padded batch count.

    Args:
        shape: (B, S) of the batch.
        lengths: tokens of each sequence.
        first: global index of the batch's first sequence.
        quarter: which quarter of the data the batch belongs to.
        kinds: the index in `MODALITIES` of each token, int8 [B, S]; None in a run of text.
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
        kinds=None if kinds is None else kinds.flatten().long(),
        segments=_find_segments(kinds.flatten(), spans)
        if kinds is not None and bool(kinds.any())
        else tuple(Segment(span, 0, slice(*bounds)) for span, bounds in enumerate(spans)),
    )


def _find_segments(kinds: torch.Tensor, spans: Sequence[tuple[int, int]]) -> tuple[Segment, ...]:
    """Find the runs of one modality in each range; index lists if there are many runs."""
    runs: list[Segment] = []
    for span, (first, stop) in enumerate(spans):
        changes = (kinds[first + 1 : stop] != kinds[first : stop - 1]).nonzero().flatten() + 1
        bounds = [first, *(first + changes).tolist(), stop]
        runs += (
            Segment(span, int(kinds[start]), slice(start, end)) for start, end in pairwise(bounds)
        )
    if len(runs) <= _MOST_RUNS:
        return tuple(runs)
    codes = torch.unique(kinds).tolist()
    lists = (
        (span, kind, (kinds[first:stop] == kind).nonzero().flatten() + first)
        for span, (first, stop) in enumerate(spans)
        for kind in codes
    )
    return tuple(Segment(span, kind, rows) for span, kind, rows in lists if len(rows))


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
