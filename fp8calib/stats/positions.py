"""Ranges of token positions inside a sequence, by which magnitudes are kept."""

from __future__ import annotations

FIRST_RANGE = 512
"""Positions in the first range; every other is as long as all before it."""
NUM_RANGES = 12
"""The last one has no end: it holds all positions from 2**19 on."""


def range_starts() -> list[int]:
    """Give the first position of every range: 0, 512, 1024, 2048, ..."""
    return [0, *(FIRST_RANGE << octave for octave in range(NUM_RANGES - 1))]


def split_positions(length: int) -> list[tuple[int, int]]:
    """Cut a sequence at the ranges: first position and the one after the last, of each."""
    starts = [start for start in range_starts() if start < length]
    return list(zip(starts, [*starts[1:], length], strict=True))
