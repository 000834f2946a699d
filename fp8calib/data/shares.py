"""Split the batches of a data plan among processes, and drop those that are finished.

Batches are cut from the plan before they are split, so their contents do not depend on which
process runs them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeVar

from fp8calib.data.sequences import Batch, DataPlan, batches, cut_batch
from fp8calib.errors import UsageError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Part `index` (from 1) of `count` neighbouring parts of nearly equal length."""

    index: int = 1
    count: int = 1

    def take(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this part of a list."""
        first, stop = (index * len(items) // self.count for index in (self.index - 1, self.index))
        return items[first:stop]


def parse_share(text: str) -> Share:
    """Parse `I/N`.

    Raises:
        UsageError: the text has another form, or I is not from 1 to N.
    """
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UsageError(
            f"--shard {text}: not I/N with I from 1 to N", hint="the second of four is 2/4"
        )
    return Share(index=int(match[1]), count=int(match[2]))


def select_batches(plan: DataPlan, batch_size: int, shard: Share | None) -> list[Batch]:
    """Cut a plan into batches and return those of a shard, or all of them.

    Raises:
        UsageError: there are fewer batches than shards.
    """
    whole = list(batches(plan, batch_size))
    if shard is None:
        return whole
    if shard.count > len(whole):
        raise UsageError(
            f"--shard {shard.index}/{shard.count}: the data gives only {len(whole)} batches",
            hint=f"use --shard 1/{len(whole)} to {len(whole)}/{len(whole)}, or more --samples",
        )
    return list(shard.take(whole))


def sequence_ranges(batches: Iterable[Batch]) -> list[tuple[int, int]]:
    """List the sequences of each batch as a range of global indices, the stop exclusive."""
    return [(batch.first, batch.first + len(batch.lengths)) for batch in batches]


def drop_finished(batches: Iterable[Batch], done: Collection[tuple[int, int]]) -> list[Batch]:
    """Remove finished sequences from batches; a batch without any is unchanged.

    `done` are ranges of global indices, the stop exclusive.
    """
    left = []
    for batch in batches:
        places = range(batch.first, batch.first + len(batch.lengths))
        are_done = [any(first <= place < stop for first, stop in done) for place in places]
        for is_done, group in groupby(range(len(places)), are_done.__getitem__):
            rows = list(group)
            if not is_done:
                left.append(cut_batch(batch, rows[0], rows[-1] + 1))
    return left
