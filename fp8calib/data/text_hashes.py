"""Hashes that find shared text in two data sets, however each was cut into rows and sequences.

Every window of 32 tokens is hashed. The first window of a row is kept, and every other
window whose hash is a multiple of 32. Equal text therefore gives equal hashes at any offset and in
any order.
`hash_row` states what this misses.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TOKENS_PER_HASH = 32
"""Length of a window: one hash covers this many tokens."""
_KEEP_ONE_IN = 32
_COMMON_ROWS = 2
_COMMON_SHARE = 10
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class TextHashes:
    """Hashes of a text, and the number of its rows in which each occurs."""

    hashes: torch.Tensor
    """int64, sorted, unique: the hashes of two texts together are the union of both."""
    num_rows: torch.Tensor
    """int64, one for each hash."""

    def distinctive(self) -> torch.Tensor:
        """Drop the hashes that many rows share (a system prompt, a template).

        Returns:
            int64, sorted: the hashes that occur in at most two rows, or in at most a tenth as many
            rows as the most common hash. All hashes, if none qualifies.
        """
        if not len(self.hashes):
            return self.hashes
        limit = max(_COMMON_ROWS, int(self.num_rows.max()) // _COMMON_SHARE)
        kept = self.hashes[self.num_rows <= limit]
        return kept if len(kept) else self.hashes


def hash_text(rows: Iterable[Sequence[int] | npt.NDArray[np.int64]]) -> TextHashes:
    """Hash the token ids of rows; empty rows are skipped."""
    hashed = [hash_row(ids) for ids in rows if len(ids)]
    joined = np.concatenate(hashed) if hashed else np.zeros(0, dtype=np.int64)
    hashes, counts = np.unique(joined, return_counts=True)
    return TextHashes(torch.from_numpy(hashes), torch.from_numpy(counts.astype(np.int64)))


def hash_row(ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return the hashes of one row: int64, sorted, unique.

    The first 32 tokens (or the whole row, if shorter) are always hashed, and one in 32 of the other
    windows. Shared text is certain to be found where it begins a row of both texts; in the middle
    of rows it is found with probability 1 - (31/32)^(shared tokens - 31). Fewer than 32 shared
    tokens, other spellings and other tokenizers are not found.
    """
    tokens = _mix(np.asarray(ids, dtype=np.int64).view(np.uint64) + _ODD)
    width = min(TOKENS_PER_HASH, len(tokens))
    num_windows = len(tokens) - width + 1
    windows = np.full(num_windows, width, dtype=np.uint64)
    for offset in range(width):
        windows = windows * _ODD + tokens[offset : offset + num_windows]
    hashes = _mix(windows)
    chosen = hashes % np.uint64(_KEEP_ONE_IN) == 0
    chosen[0] = True
    return np.unique(hashes[chosen].view(np.int64))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Make every bit depend on every bit (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
