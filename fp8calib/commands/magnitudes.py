"""What stands out among magnitudes or scales: the largest, the smallest, and outliers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import median_low
from typing import TYPE_CHECKING

from fp8calib.errors import cut_list, format_ranges, shorten

if TYPE_CHECKING:
    from fp8calib.commands.show import StatsShown

FAR = 8.0
"""A value this many times larger or smaller than the median of its kind is an outlier."""
_SHOWN_OUTLIERS = 3


@dataclass(frozen=True, slots=True)
class Magnitude:
    """One value: an amax or a scale."""

    place: str
    """Where it is, such as `layer 3`."""
    kind: str
    """Only values of the same kind are compared."""
    value: float


def _summarize(title: str, rows: Sequence[Magnitude]) -> str:
    """Give the smallest and the largest value and the outliers in one line; empty without rows."""
    known = [row for row in rows if row.value > 0]
    if not known:
        return f"{title}: all zero" if rows else ""
    least = min(known, key=lambda row: row.value)
    most = max(known, key=lambda row: row.value)
    ends = f"{title}: {least.value:.4g} ({least.place}) to {most.value:.4g} ({most.place})"
    zeros = [row.place for row in rows if row.value == 0]
    outliers = list(_find_outliers(known))
    return "; ".join(
        (
            ends,
            *([f"outliers: {_cut_outliers(outliers)}"] if outliers else []),
            *([f"all zero: {cut_list(zeros, _SHOWN_OUTLIERS)}"] if zeros else []),
        )
    )


def _cut_outliers(outliers: Sequence[tuple[Magnitude, float]], most: int = _SHOWN_OUTLIERS) -> str:
    """Describe the few that are farthest from the median, and count the others."""
    farthest = sorted(outliers, key=lambda found: -max(found[1], 1 / found[1]))
    times = [f"{r:,.0f} times" if r > 1 else f"1/{1 / r:,.0f} of" for _, r in farthest]
    described = (
        f"{row.place}: {row.value:.4g} ({far} the median)"
        for (row, _), far in zip(farthest, times, strict=True)
    )
    return cut_list(list(described), most)


def _find_outliers(rows: Iterable[Magnitude]) -> Iterator[tuple[Magnitude, float]]:
    """Find the values that are far from the median of their kind, each with its ratio to it."""
    kinds: dict[str, list[Magnitude]] = {}
    for row in rows:
        kinds.setdefault(row.kind, []).append(row)
    for members in kinds.values():
        middle = median_low(row.value for row in members)
        for row in members:
            if not middle / FAR <= row.value <= middle * FAR:
                yield row, row.value / middle


def summarize_layers(result: StatsShown) -> Iterator[str]:
    """Give the largest and the smallest amax of each kind, and the outliers."""
    for column, rows in _list_magnitudes(result):
        of_linears = f" of {len(rows)} linears" if column in _OF_LINEARS else ""
        line = _summarize(f"{column}{of_linears}", rows)
        needed = result.unfit_queries if column == "q amax" else []
        need = f"; layers that need a q scale: {format_ranges(needed)}" if needed else ""
        yield from [line + need] if line else []


def summarize_briefly(result: StatsShown) -> Iterator[str]:
    """Give the range of K, V and q in one line, and the outliers of all in another."""
    ranges, outliers = [], []
    for column, rows in _list_magnitudes(result):
        role = column.removesuffix(" amax")
        known = [row for row in rows if row.value > 0]
        if known and column not in _OF_LINEARS:
            least, most = (pick(known, key=lambda row: row.value) for pick in (min, max))
            ranges.append(f"{role} {least.value:.3g} to {most.value:.3g} in {most.place}")
        outliers += [
            (replace(row, place=f"{role} of {row.place}"), ratio)
            for row, ratio in _find_outliers(known)
        ]
    if ranges:
        yield f"amax: {', '.join(ranges)}"
    if outliers:
        yield f"outliers: {_cut_outliers(outliers, 1)}"


_OF_LINEARS = ("input amax", "weight amax")


def _list_magnitudes(result: StatsShown) -> Iterator[tuple[str, list[Magnitude]]]:
    """List the known values of each column: of K, V and q by layer, and of linears by name."""
    layers = [(f"layer {row.layer}", "", row) for row in result.layers]
    linears = [(shorten(row.linear), _name_kind(row.linear), row) for row in result.linears]
    for role in ("k", "v", "q", "input", "weight"):
        column = f"{role} amax"
        rows = linears if column in _OF_LINEARS else layers
        known = ((place, kind, getattr(row, f"{role}_amax")) for place, kind, row in rows)
        yield column, [Magnitude(*each) for each in known if each[-1] is not None]


def _name_kind(module: str) -> str:
    """Leave out the numbers of a module path: `model.layers.3.mlp` and `.4.mlp` are one kind."""
    return ".".join(part for part in module.split(".") if not part.isdecimal())


def summarize_scales(rows: Iterable[tuple[str, Sequence[float | str] | str]]) -> Iterator[str]:
    """Summarize the scales of a file, those with the same name in different layers together."""
    kinds: dict[str, list[Magnitude]] = {}
    for name, values in rows:
        kind = name.rpartition(".")[2] if not name[-1:].isdecimal() else _name_kind(name)
        found = kinds.setdefault(kind, [])
        if not isinstance(values, str):
            found += [Magnitude(shorten(name), _name_kind(name), float(each)) for each in values]
    for kind, found in kinds.items():
        title = f"{len(found):,} of {shorten(kind)}"
        if not found:
            yield f"{shorten(kind)}: too many values to read"
        elif not any(row.value for row in found):
            yield f"{title}: all zero"
        elif usable := [row for row in found if 0 < row.value < inf]:
            yield _summarize(title, usable) + _name_unusable(found)
        else:
            yield title + _name_unusable(found)


def _name_unusable(rows: Iterable[Magnitude]) -> str:
    """Name the scales that no engine can use."""
    wrong = [f"{row.place}: {row.value:.4g}" for row in rows if not 0 < row.value < inf]
    return f"; not finite and above zero: {cut_list(wrong, _SHOWN_OUTLIERS)}" if wrong else ""
