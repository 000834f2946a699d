"""Where batches became smaller because memory ran out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class BackOff:
    """The sequence from which on batches had to be smaller, and their size from there."""

    first: int
    batch_size: int
