"""The lines and tables that show a result, before a terminal, a page or Markdown draws them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias


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
    anchor: str = ""
    """The id of the figure on a page that shows more."""

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

    @property
    def texts(self) -> list[list[str]]:
        """The text of every cell, row by row."""
        return [list(map(str, row)) for row in self.rows]

    def without(self, column: str) -> Table:
        """Leave out a column."""
        left = self.columns.index(column)
        columns, *rows = ([*row[:left], *row[left + 1 :]] for row in (self.columns, *self.rows))
        return replace(self, columns=list(map(str, columns)), rows=rows)


Block: TypeAlias = Line | Table
