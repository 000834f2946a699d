"""The summary of a result on one screen, for Python sessions and notebooks."""

from __future__ import annotations

import textwrap
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from fp8calib.errors import fit_line

_MOST_ROWS = 9
_MOST_NOTES = 6
_MOST_LINES = 2
"""Lines of a note."""
_MOST_WORD = 20
"""Characters that breaking a line between words may lose."""
_MOST_CHARS = 110
_MOST_CELL_CHARS = 48


@dataclass(frozen=True, slots=True)
class Overview:
    """A title, a small table and a few sentences; what does not fit on a screen is cut."""

    title: str
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    notes: Sequence[str] = ()

    def to_text(self) -> str:
        """Render it as at most 25 lines."""
        table = [[*self.columns], *self._cut_rows()] if self.rows else []
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        return "\n".join(
            [
                _cut(self.title),
                *(f"  {line}" for line in lines),
                *self._count_left(),
                *(line for note in self._cut_notes() for line in textwrap.wrap(note, _MOST_CHARS)),
            ]
        )

    def to_html(self) -> str:
        """Render it as a paragraph, a table and a list."""
        head = "".join(f"<th>{escape(column)}</th>" for column in self.columns)
        rows = (
            f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>"
            for row in self._cut_rows()
        )
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
        notes = (f"<p>{escape(note)}</p>" for note in (*self._count_left(), *self._cut_notes()))
        title = f"<p><b>{escape(_cut(self.title))}</b></p>"
        return f"{title}{table if self.rows else ''}{''.join(notes)}"

    def _cut_rows(self) -> list[list[str]]:
        return [[_cut(cell, _MOST_CELL_CHARS) for cell in row] for row in self.rows[:_MOST_ROWS]]

    def _count_left(self) -> list[str]:
        left = len(self.rows) - _MOST_ROWS
        return [f"  and {left} more"] if left > 0 else []

    def _cut_notes(self) -> list[str]:
        left = len(self.notes) - _MOST_NOTES
        more = [f"and {left} more"] if left > 0 else []
        return [
            *(
                _cut(note, _MOST_LINES * _MOST_CHARS - _MOST_WORD)
                for note in self.notes[:_MOST_NOTES]
            ),
            *more,
        ]


class WithOverview:
    """A result whose `repr` is its overview instead of all its figures."""

    __slots__ = ()

    @abstractmethod
    def overview(self) -> Overview:
        """Summarize the result for one screen."""

    def __repr__(self) -> str:
        return self.overview().to_text()

    __str__ = __repr__

    def _repr_html_(self) -> str:
        return self.overview().to_html()


def _cut(text: str, most: int = _MOST_CHARS) -> str:
    line = fit_line(text)
    return line if len(line) <= most else f"{line[: most - 4]} ..."
