"""Two kinds of chart as SVG: values over places, and histograms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from markupsafe import Markup

from fp8calib.verification.tables import format_mean_kld

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, FLOOR = 56, 432, 24, 192
"""The area of the data, in units of the view box."""
_BIN_OCTAVES = 1 / 8
_STEPS = (1, 2, 5, 10, 20, 50, 100)
_MARKS = {
    "\N{BLACK CIRCLE}": "m-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0",
    "\N{BLACK SQUARE}": "m-3-3h6v6h-6z",
    "\N{BLACK UP-POINTING TRIANGLE}": "m0-3l3 6h-6z",
    "\N{BLACK DIAMOND}": "m0-3l3 3l-3 3l-3-3z",
    "\N{HEAVY PLUS SIGN}": "m-3 0h6m-3-3v6",
    "\N{BLACK DOWN-POINTING TRIANGLE}": "m-3-3h6l-3 6z",
    "\N{MULTIPLICATION X}": "m-3-3l6 6m0-6l-6 6",
}
"""The path of each mark around its point."""


class Style(NamedTuple):
    """The style of a series: classes of page.css, and its mark as a character of the legend."""

    css: str
    glyph: str


BASELINE = Style("base dotted", "\N{MULTIPLICATION X}")
STYLES = tuple(
    Style(f"c{index} {dash}".strip(), glyph)
    for dash in ("", "dashed", "dotted")
    for index, glyph in enumerate(list(_MARKS)[:-1])
)
"""Distinct for every kind of colour vision, and by their marks alone (after Okabe-Ito, Tol)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A range of values, and where its ticks are."""

    title: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def _place(self, value: float, start: float, end: float) -> float:
        """Map a value between `low` and `high` to a coordinate; others to the nearer end."""
        ends = (self.low, self.high, min(max(value, self.low), self.high))
        low, high, at = map(math.log10, ends) if self.is_log else ends
        return start + (at - low) / (high - low) * (end - start)

    def x(self, value: float) -> float:
        """Give where a value stands across a chart."""
        return self._place(value, LEFT, RIGHT)

    def y(self, value: float) -> float:
        """Give the height of a value in a chart."""
        return self._place(value, FLOOR, TOP)


DB_AXIS = Axis(
    title="SQNR, dB",
    low=0,
    high=40,
    ticks=[
        *((float(value), str(value)) for value in (10, 20, 30)),
        (0.0, "\N{LESS-THAN OR EQUAL TO} 0"),
        (40.0, "\N{GREATER-THAN OR EQUAL TO} 40"),
    ],
)
_MOST_DECADES = 7


def log_axis(title: str, values: Iterable[float | None]) -> Axis:
    """Make an axis of whole decades, two at least, that holds the positive values.

    Seven at most: what is smaller is drawn at its lower end, whose tick says so.
    """
    logs = [math.log10(value) for value in values if value is not None and value > 0] or [0.0]
    high = math.ceil(max(logs))
    least = math.floor(min(logs))
    low = max(min(least, high - 2), high - _MOST_DECADES)
    names = {n: f"{10.0**n:g}" if -4 < n < 5 else f"1e{n}" for n in range(low, high + 1)}
    if least < low:
        names[low] = f"\N{LESS-THAN OR EQUAL TO} {names[low]}"
    ticks = [(10.0**n, name) for n, name in names.items()]
    return Axis(title=title, low=10.0**low, high=10.0**high, ticks=ticks, is_log=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart with its title."""

    title: str
    chart: Markup
    legend: Sequence[tuple[Style, str]] = ()


class Point(NamedTuple):
    """A value at a place, what a pointer shows of it, and its standard error."""

    value: float | None
    """None is a gap."""
    tip: str
    error: float | None = None


class Curve(NamedTuple):
    """One series of a chart: a point for each place, or None."""

    label: str
    style: Style
    points: Sequence[Point | None]


def kld_curve(label: str, style: Style, rows: Iterable[Any]) -> Curve:
    """Make the curve of rows of a report, which have a `kld_mean`, or None."""
    points = [
        row and Point(row.kld_mean or None, format_mean_kld(row.kld_mean, row.kld_se), row.kld_se)
        for row in rows
    ]  # the logarithm of zero is a gap
    return Curve(label, style, points)


def place_chart(
    title: str,
    places: Sequence[tuple[str, str]],
    curves: Sequence[Curve],
    *,
    x_title: str,
    y: Axis | None = None,
    joined: bool = False,
    floor: tuple[float, str] | None = None,
) -> Figure:
    """Draw curves over places: the name below each, and the first line that a pointer shows.

    Without `y` they are mean divergences. Points are `joined` by lines, or stand side by side with
    their standard errors. `floor` is a value below which nothing is good, and the text below its
    dashed line. A curve without a value is left out.
    """
    values = [[point.value if point else None for point in curve.points] for curve in curves]
    curves = [c for c, known in zip(curves, values, strict=True) if {*known} - {None}]
    y = y or log_axis("mean KLD, nats", chain.from_iterable(values))
    step = (RIGHT - LEFT) / max(len(places), 1)
    xs = [LEFT + step * (index + 0.5) for index in range(len(places))]
    longest = max((len(name) for name, _ in places), default=1)
    every = next((n for n in _STEPS if step * n >= 9 * longest + 8), len(places) or 1)
    parts = [*_draw_grid(y), _text((LEFT + RIGHT) / 2, FLOOR + 32, x_title, "middle")]
    named = [_text(x, FLOOR + 15, name, "middle") for x, (name, _) in zip(xs, places, strict=True)]
    parts += named[::every]
    if floor is not None:
        parts.append(_path(f"M{LEFT} {y.y(floor[0]):.1f}H{RIGHT}", "limit"))
        parts.append(_text(RIGHT - 2, y.y(floor[0]) + 15, floor[1], "end"))
    apart = 0.0 if joined else min(9.0, step * 0.8 / max(len(curves), 1))
    for number, (_, style, points) in enumerate(curves):
        shift = apart * (number - (len(curves) - 1) / 2)
        drawn = _draw_points(points, [x + shift for x in xs], y, _MARKS[style.glyph])
        under = _path(drawn[0], "line") if joined else _path(drawn[1], "error")
        group = Markup('<g class="{}">{}{}</g>')
        parts.append(group.format(style.css, under, _path(drawn[2], "marks")))
    strip = Markup('<path d="{}" class="hover"><title>{}</title></path>')
    for index, (x, (_, tip)) in enumerate(zip(xs, places, strict=True)):
        here = [(curve.label, curve.points[index]) for curve in curves]
        lines = "\n".join([tip, *(f"{label}: {point.tip}" for label, point in here if point)])
        outline = f"M{x - step / 2:.1f} {TOP}h{step:.1f}V{FLOOR}h-{step:.1f}z"
        parts.append(strip.format(outline, lines))
    legend = [(style, label) for label, style, _ in curves]
    return Figure(title=title, chart=_join(title, parts), legend=legend)


def _draw_points(
    points: Sequence[Point | None], xs: Sequence[float], y: Axis, mark: str
) -> tuple[str, str, str]:
    """Give the paths of the line, of the errors and of the marks."""
    line = errors = marks = ""
    move = "M"
    for x, point in zip(xs, points, strict=True):
        if point is None or point.value is None:
            move = "M"
            continue
        at = f"{x:.1f} {y.y(point.value):.1f}"
        line, move, marks = f"{line}{move}{at}", "L", f"{marks}M{at}{mark}"
        if point.error is not None:
            low, high = (y.y(point.value + sign * point.error) for sign in (-1, 1))
            errors += f"M{x:.1f} {low:.1f}V{high:.1f}"
    return line, errors, marks


def histogram(
    site: str, counts: Mapping[float, int], scale: float, ends: tuple[float, float]
) -> Figure:
    """Draw the magnitudes of a tensor in units of its scale, and the range that FP8 covers.

    Counts are by the lower edge of a bin as log2 |x|, bins 1/8 octave wide. Below the first of
    `ends` values become zero, above the second they clip. Outside of them the ground is shaded;
    dashed lines are the ends of scale 1.0.
    """
    shift, total = math.log2(scale), sum(counts.values())
    title = f"log2(|x| / scale); zero below {ends[0]:.2g}, clips above {ends[1]:.4g}"
    ticks = [(float(value), str(value)) for value in range(-12, 15, 4)]
    x = Axis(title=title, low=-16.0, high=14.0, ticks=ticks)  # e4m3 covers -10 to 8.8 of it
    y = log_axis("share of values", [1.0, 1e-7])
    bins: dict[float, float] = {}
    for edge, count in counts.items():
        at = min(max(edge - shift, x.low), x.high - _BIN_OCTAVES)  # the ends hold what is beyond
        bins[at] = bins.get(at, 0) + count / total
    steps = f"M{x.x(min(bins)):.1f} {FLOOR}"
    for at, share in bins.items():
        steps += f"V{y.y(share) if share else FLOOR:.1f}H{x.x(at + _BIN_OCTAVES):.1f}"
    inside = [math.log2(end) - shift for end in ends]
    outside = ((LEFT, x.x(inside[0])), (x.x(inside[1]), RIGHT))
    parts = [_path(f"M{a:.1f} {TOP}H{b:.1f}V{FLOOR}H{a:.1f}z", "lost") for a, b in outside]
    parts += _draw_grid(y)
    parts += [_text(x.x(v), FLOOR + 15, name, "middle") for v, name in x.ticks]
    parts.append(_text((LEFT + RIGHT) / 2, FLOOR + 32, x.title, "middle"))
    parts.append(_path(f"{steps}V{FLOOR}z", "bar c0"))
    unscaled = [end - shift for end in inside if x.low < end - shift < x.high]
    parts += [_path(f"M{x.x(end):.1f} {TOP}V{FLOOR}", "limit") for end in unscaled]
    return Figure(title=site, chart=_join(site, parts))


def _join(label: str, parts: Sequence[Markup]) -> Markup:
    chart = Markup('<svg viewBox="0 0 {} {}" role="img" aria-label="{}">{}</svg>')
    return chart.format(WIDTH, HEIGHT, label, Markup("").join(parts))


def _draw_grid(y: Axis) -> Iterator[Markup]:
    yield _path("".join(f"M{LEFT} {y.y(value):.1f}H{RIGHT}" for value, _ in y.ticks), "grid")
    yield from (_text(LEFT - 6, y.y(value) + 4, name, "end") for value, name in y.ticks)
    yield _text(LEFT - 6, 12, y.title, "start")


def _path(drawn: str, css: str) -> Markup:
    return Markup('<path d="{}" class="{}"/>').format(drawn, css)


def _text(x: float, y: float, text: str, anchor: str) -> Markup:
    made = Markup('<text x="{:.1f}" y="{:.1f}" text-anchor="{}">{}</text>')
    return made.format(x, y, anchor, text)
