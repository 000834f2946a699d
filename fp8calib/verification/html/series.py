"""Labels and styles of candidates, the same on every plot of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fp8calib.verification.html.plots import BASELINE, STYLES, Style
from fp8calib.verification.report import SCALE_ONE, VerifyReport

_LONGEST_LABEL = 36
_DASHES = ("solid", "dash", "dashdot")


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """A candidate's label and style."""

    name: str
    label: str
    """The name, or only its end if it is long."""
    style: Style


def make_series(report: VerifyReport) -> tuple[Series, ...]:
    """Assign each candidate a label and a style, in the report's order."""
    names = [candidate.name for candidate in report.candidates]
    styles = iter([_choose_style(index) for index in range(len(names))])
    return tuple(
        Series(name=name, label=label, style=BASELINE if name == SCALE_ONE else next(styles))
        for name, label in zip(names, _shorten(names), strict=True)
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
