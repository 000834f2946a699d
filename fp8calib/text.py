"""What shows a result, before a terminal or a page draws it: lines, tables, sizes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

_MIB = 2**20
GIB = 2**30


@dataclass(frozen=True, slots=True)
class Line:
    """Text of one or several lines."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class Answer(Line):
    """The answer of a command, which a terminal shows beside JSON too."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table that has more than its text."""

    text: str
    aside: str = ""
    """An explanation, which only a page has space for."""
    kind: str = ""
    """What it says: `name`, a verdict, or `bad`."""

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with a title."""

    title: str = ""
    columns: Sequence[str]
    rows: Sequence[Sequence[str | Cell]]
    words: Collection[int] = (0,)
    """The columns that hold words; all other columns hold numbers."""

    def kind_of(self, column: int) -> str:
        """Tell whether a column holds words or numbers."""
        return "words" if column in self.words else "number"

    def without(self, column: str) -> Table:
        """Leave out a column."""
        left = self.columns.index(column)
        columns, *rows = ([*row[:left], *row[left + 1 :]] for row in (self.columns, *self.rows))
        words = [index - (index > left) for index in self.words if index != left]
        return replace(self, columns=list(map(str, columns)), rows=rows, words=words)


Block: TypeAlias = Line | Table


_MEMORY_PARTS = {
    "process": "Python and its libraries",
    "layers": "two layers",
    "micro-batch": "a batch",
    "around the layers": "weights beside the layers",
    "embedding": "rows of the embedding",
    "head": "the output head",
    "loading": "copies while it is loaded",
}


def describe_peak(parts: Mapping[str, int], decimals: int = 2) -> str:
    """Describe peak bytes by what needs them: their sum, and the three largest."""
    largest = sorted(parts, key=lambda name: -parts[name])[:3]
    named = (f"{_MEMORY_PARTS.get(name, name)} {format_gib(parts[name])}" for name in largest)
    return f"{format_gib(sum(parts.values()), decimals)} (mostly {', '.join(named)})"


def format_gib(size_bytes: int, decimals: int = 2) -> str:
    """Format a size of memory: `12 MiB` below a tenth of a GiB, otherwise `1.25 GiB`."""
    if size_bytes < GIB // 10:
        return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
    return f"{size_bytes / GIB:.{decimals}f} GiB"


def count_decimals(one_bytes: int, other_bytes: int) -> int:
    """Count the decimals, 2 at least, with which two sizes are different numbers of GiB."""
    return next(
        (n for n in range(2, 10) if f"{one_bytes / GIB:.{n}f}" != f"{other_bytes / GIB:.{n}f}"), 2
    )
