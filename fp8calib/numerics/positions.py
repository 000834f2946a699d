"""The ranges of token positions in a sequence; every range has its own amax."""

from __future__ import annotations

FIRST_RANGE = 512
"""The length of the first range; every other range is as long as all ranges before it."""
NUM_RANGES = 12
"""The last range has no end: it holds all positions from 2**19 on."""
RANGE_STARTS = (0, *(FIRST_RANGE << octave for octave in range(NUM_RANGES - 1)))
"""The first position of every range: 0, 512, 1024, 2048, ..."""


def split_positions(length: int) -> list[tuple[int, int]]:
    """Split a sequence into the ranges of its positions, as half-open intervals."""
    starts = [start for start in RANGE_STARTS if start < length]
    return list(zip(starts, [*starts[1:], length], strict=True))
