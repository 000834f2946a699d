"""Rows of several sources, one after another or mixed by weight."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from fp8calib.data.rows import Row


def mix_rows(
    sources: Sequence[tuple[Iterator[Row], float | None]], *, seed: int = 0
) -> Iterator[Row]:
    """Join the rows of (rows, weight) pairs.

    Without any weight the sources follow one another. With one, each row comes from a source drawn
    in proportion to the weights (those without count as 1) among the sources that are not used up.
    The order inside a source never changes.
    """
    if all(weight is None for _, weight in sources):
        return itertools.chain.from_iterable(rows for rows, _ in sources)
    weighted = [(rows, 1.0 if weight is None else weight) for rows, weight in sources]
    return _draw_rows(weighted, random.Random(seed))  # noqa: S311  an order, not a secret


def _draw_rows(sources: list[tuple[Iterator[Row], float]], rng: random.Random) -> Iterator[Row]:
    while sources:
        index = _draw_index([weight for _, weight in sources], rng)
        row = next(sources[index][0], None)
        if row is None:
            del sources[index]
        else:
            yield row


def _draw_index(weights: list[float], rng: random.Random) -> int:
    # Written out because only random() promises the same numbers in every Python.
    ends = list(itertools.accumulate(weights))
    point = rng.random() * ends[-1]
    return next((index for index, end in enumerate(ends) if point < end), len(ends) - 1)
