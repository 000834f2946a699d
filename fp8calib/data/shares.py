"""What of a data plan one run takes: its share, less what others have done already.

Batches are cut from the plan before they are shared out, so what they hold does not depend on who
runs them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from fp8calib.data.plan import Batch, DataPlan, batches, cut_batch
from fp8calib.errors import UsageError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part `index` (from 1) of `count` neighbouring parts of nearly equal length."""

    index: int = 1
    count: int = 1

    def take(self, items: Sequence[Item]) -> Sequence[Item]:
        """Give the part of a list."""
        first, stop = (index * len(items) // self.count for index in (self.index - 1, self.index))
        return items[first:stop]


def parse_share(text: str) -> Share:
    """Read `I/N`.

    Raises:
        UsageError: it is something else.
    """
    found = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if found is None or not 1 <= int(found[1]) <= int(found[2]):
        raise UsageError(
            f"--shard {text}: not I/N with I from 1 to N", hint="the second of four is 2/4"
        )
    return Share(index=int(found[1]), count=int(found[2]))


def select_batches(plan: DataPlan, batch_size: int, shard: Share | None) -> list[Batch]:
    """Cut a plan into batches and give those of a shard, or all.

    Raises:
        UsageError: there are fewer batches than shards.
    """
    found = list(batches(plan, batch_size))
    if shard is None:
        return found
    if shard.count > len(found):
        raise UsageError(
            f"--shard {shard.index}/{shard.count}: the data makes only {len(found)} batches",
            hint=f"use at most {len(found)} shards, or more --samples",
        )
    return list(shard.take(found))


def sequence_ranges(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """List the sequences of batches: global index of the first, and of the one after the last."""
    return [(batch.first, batch.first + len(batch.lengths)) for batch in batches]


def drop_finished(batches: Iterable[Batch], done: Collection[tuple[int, int]]) -> list[Batch]:
    """Drop the sequences that are done from batches; a batch that holds none of them stays as is.

    Args:
        batches: neighbouring sequences each.
        done: ranges of global indices, the second one exclusive.
    """
    return [left for batch in batches for left in _leave_out_of(batch, done)]


def _leave_out_of(batch: Batch, done: Collection[tuple[int, int]]) -> Iterator[Batch]:
    num_sequences = len(batch.lengths)
    is_done = [
        any(first <= batch.first + row < stop for first, stop in done)
        for row in range(num_sequences)
    ]
    if not any(is_done):
        yield batch
        return
    row = 0
    while row < num_sequences:
        stop = row
        while stop < num_sequences and not is_done[stop]:
            stop += 1
        if stop > row:
            yield cut_batch(batch, row, stop)
        row = stop + 1
