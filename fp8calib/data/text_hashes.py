"""Hashes that find a text again in another one, however the two were cut into rows and sequences.

Runs of 32 tokens are hashed where a row begins and wherever the hash itself says so (one run in
32), so that the same words give the same hashes at any offset, in any order. What this cannot tell
is in `hash_row`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

TOKENS_PER_HASH = 32
"""Tokens of one hash."""
_ONE_IN = 32
_COMMON_ROWS = 2
_COMMON_SHARE = 10
_ODD = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, eq=False)
class TextHashes:
    """Hashes of a text, and in how many of its rows each occurs."""

    hashes: torch.Tensor
    """int64, sorted, unique: the union of two texts' hashes is that of both texts."""
    num_rows: torch.Tensor
    """int64, one for each hash."""

    def distinctive(self) -> torch.Tensor:
        """Leave out what many rows share (a system prompt, a template); all where nothing is left.

        Returns:
            int64, sorted: the hashes in at most two rows, or in at most a tenth of the most rows
            any hash occurs in.
        """
        if not len(self.hashes):
            return self.hashes
        limit = max(_COMMON_ROWS, int(self.num_rows.max()) // _COMMON_SHARE)
        kept = self.hashes[self.num_rows <= limit]
        return kept if len(kept) else self.hashes


def hash_text(rows: Iterable[Sequence[int] | npt.NDArray[np.int64]]) -> TextHashes:
    """Hash the token ids of rows; empty rows are passed over."""
    found = [hash_row(ids) for ids in rows if len(ids)]
    joined = np.concatenate(found) if found else np.zeros(0, dtype=np.int64)
    hashes, counts = np.unique(joined, return_counts=True)
    return TextHashes(torch.from_numpy(hashes), torch.from_numpy(counts.astype(np.int64)))


def hash_row(ids: Sequence[int] | npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Give the hashes of one row: int64, sorted, unique.

    Those of its first 32 tokens (of all of them where it is shorter) and of one run in 32 of the
    others. A run that two texts share is found for certain where it begins a row of both, and in
    the middle of rows with a probability of 1 - (31/32)^(shared tokens - 31). Fewer shared tokens
    than 32, other spellings and other tokenizers are not found.
    """
    tokens = _mix(np.asarray(ids, dtype=np.int64).view(np.uint64) + _ODD)
    width = min(TOKENS_PER_HASH, len(tokens))
    num_runs = len(tokens) - width + 1
    runs = np.full(num_runs, width, dtype=np.uint64)
    for offset in range(width):
        runs = runs * _ODD + tokens[offset : offset + num_runs]
    hashes = _mix(runs)
    chosen = hashes % np.uint64(_ONE_IN) == 0
    chosen[0] = True
    return np.unique(hashes[chosen].view(np.int64))


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Let every bit depend on every bit (the finalizer of splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    return x
