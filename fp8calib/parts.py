"""Which part of a run some statistics are: what is written before a run is whole."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class StatsPart(BaseModel):
    """The sequences of a data plan that statistics come from, and what was meant to be run."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    index: int
    """Which part of the run, from 1."""
    count: int
    """How many parts the run was cut into."""
    batch_size: int
    """Decides, with the data plan, what micro-batches hold."""
    sequences: tuple[tuple[int, int], ...]
    """Those that were run: global indices of the first and of the one after the last, sorted."""
    is_checkpoint: bool = False
    """Kept by a run for the one that goes on after it; weights may be missing."""

    @property
    def num_sequences(self) -> int:
        """How many sequences were run."""
        return sum(stop - first for first, stop in self.sequences)

    def describe(self) -> str:
        """Say which part it is."""
        return f"part {self.index} of {self.count}"


def join_ranges(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Sort ranges of sequences and join those that touch.

    Raises:
        ValueError: two of them overlap.
    """
    joined: list[tuple[int, int]] = []
    for first, stop in sorted(ranges):
        if joined and first < joined[-1][1]:
            msg = f"sequence {first} is in two parts"
            raise ValueError(msg)
        if joined and first == joined[-1][1]:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((first, stop))
    return tuple(joined)
