"""The candidates of a page: their labels, colours, marks and dashes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8calib.verification.report import SCALE_ONE, VerifyReport

_LONGEST_LABEL = 36
_DASHES = ("", "6 3", "6 2 1 2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Style:
    """The style of one series."""

    color: str
    """The class that page.css gives a colour, one for a light and one for a dark page."""
    glyph: str
    """The mark, as a character of the legend."""
    dash: str = ""


BASELINE = Style(color="base", glyph="\N{MULTIPLICATION X}", dash="2 3")
STYLES = (
    Style(color="c0", glyph="\N{BLACK CIRCLE}"),
    Style(color="c1", glyph="\N{BLACK SQUARE}"),
    Style(color="c2", glyph="\N{BLACK UP-POINTING TRIANGLE}"),
    Style(color="c3", glyph="\N{BLACK DIAMOND}"),
    Style(color="c4", glyph="\N{HEAVY PLUS SIGN}"),
    Style(color="c5", glyph="\N{BLACK DOWN-POINTING TRIANGLE}"),
)
"""Distinct for every kind of colour vision, and by their marks alone (after Okabe-Ito, Tol)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A candidate's label and style."""

    name: str
    label: str
    """The name, or only its end if it is long."""
    style: Style
    group: str
    """The class of everything drawn for it, by which the legend hides it."""


def make_series(report: VerifyReport) -> tuple[Series, ...]:
    """Assign each candidate a label and a style, in the report's order."""
    names = [candidate.name for candidate in report.candidates]
    styles = iter([_choose_style(index) for index in range(len(names))])
    return tuple(
        Series(
            name=name,
            label=label,
            style=BASELINE if name == SCALE_ONE else next(styles),
            group=f"s{index}",
        )
        for index, (name, label) in enumerate(zip(names, _shorten(names), strict=True))
    )


def _choose_style(index: int) -> Style:
    """Cycle through colours and marks, with another dash in every cycle."""
    cycle, place = divmod(index, len(STYLES))
    return replace(STYLES[place], dash=_DASHES[cycle % len(_DASHES)])


def _shorten(names: Sequence[str]) -> Sequence[str]:
    """Keep only the ends of long names (they are paths), unless two ends are the same."""
    short = [_shorten_one(name) for name in names]
    return short if len(set(short)) == len(set(names)) else names


def _shorten_one(name: str) -> str:
    if len(name) <= _LONGEST_LABEL:
        return name
    end = name[1 - _LONGEST_LABEL :]
    return "\N{HORIZONTAL ELLIPSIS}" + (end[end.index("/") :] if "/" in end[:-1] else end)
