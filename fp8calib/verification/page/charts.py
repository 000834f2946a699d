"""Charts as SVG: intervals, lines by layer, histograms. Their colours are in page.css."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, NamedTuple

from markupsafe import Markup

from fp8calib.verification.figures import format_mean_kld
from fp8calib.verification.report import HistogramResult

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

    def place(self, value: float, start: float, end: float) -> float:
        """Map a value between `low` and `high` to a coordinate; others to the nearer end."""
        ends = (self.low, self.high, min(max(value, self.low), self.high))
        low, high, at = map(math.log10, ends) if self.is_log else ends
        return start + (at - low) / (high - low) * (end - start)

    def x(self, value: float) -> float:
        """Give where a value stands across a chart."""
        return self.place(value, LEFT, RIGHT)

    def y(self, value: float) -> float:
        """Give the height of a value in a chart."""
        return self.place(value, FLOOR, TOP)


def db_axis(values: Iterable[float | None]) -> Axis:
    """Make an axis of SQNR from 0 to 40 dB, longer where `values` need it."""
    known = [value for value in values if value is not None]
    low = math.floor(min([0, *known]) / 10) * 10
    high = math.ceil(max([40, *known]) / 10) * 10
    ticks = range(low, high + 1, 10 if high - low <= 100 else 50)
    named = [(float(value), str(value)) for value in ticks]
    return Axis(title="SQNR, dB", low=low, high=high, ticks=named)


def log_axis(title: str, values: Iterable[float | None], *, low: int, high: int) -> Axis:
    """Make an axis from 10**low to 10**high, longer upwards where `values` need it.

    What is smaller is drawn at its lower end, whose tick says so.
    """
    known = [value for value in values if value is not None and value > 0]
    high = max([high, *(math.ceil(math.log10(value)) for value in known)])
    every = math.ceil((high - low) / 7)
    names = {n: f"{10.0**n:g}" if -4 < n < 5 else f"1e{n}" for n in range(low, high + 1, every)}
    names[low] = f"\N{LESS-THAN OR EQUAL TO} {names[low]}"
    ticks = [(10.0**n, name) for n, name in names.items()]
    return Axis(title=title, low=10.0**low, high=10.0**high, ticks=ticks, is_log=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart with its title."""

    title: str
    chart: Markup
    legend: Sequence[tuple[Style, str]] = ()
    anchor: str = ""
    """Its id on the page."""


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


def place_chart(
    title: str,
    places: Sequence[tuple[str, str]],
    curves: Sequence[Curve],
    *,
    x_title: str,
    y: Axis,
    floor: tuple[float, str] | None = None,
) -> Figure:
    """Draw curves over places: the name below each, and the first line that a pointer shows.

    With `floor`, a value below which nothing is good and the text below its dashed line, they are
    lines; without it intervals, side by side. One without a value is left out.
    """
    curves = [c for c in curves if any(p is not None and p.value is not None for p in c.points)]
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
    apart = min(9.0, step * 0.8 / max(len(curves), 1)) if floor is None else 0.0
    for number, (_, style, points) in enumerate(curves):
        shift = apart * (number - (len(curves) - 1) / 2)
        drawn = _draw_points(points, [x + shift for x in xs], y, _MARKS[style.glyph])
        under = _path(drawn[0], "line") if floor is not None else _path(drawn[1], "error")
        group = Markup('<g class="{}">{}{}</g>')
        parts.append(group.format(style.css, under, _path(drawn[2], "marks")))
    strip = Markup('<path d="{}" class="hover"><title>{}</title></path>')
    for index, (x, (_, tip)) in enumerate(zip(xs, places, strict=True)):
        found = [(curve.label, curve.points[index]) for curve in curves]
        told = "\n".join([tip, *(f"{label}: {point.tip}" for label, point in found if point)])
        outline = f"M{x - step / 2:.1f} {TOP}h{step:.1f}V{FLOOR}h-{step:.1f}z"
        parts.append(strip.format(outline, told))
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


def kld_chart(
    title: str,
    places: Sequence[tuple[str, str]],
    series: Sequence[tuple[str, Style, Sequence[Any]]],
    *,
    x_title: str,
    low: int,
) -> Figure:
    """Draw mean divergences with their errors, from 10**low on.

    `series` are a label, a style and rows of a report, which have a `kld_mean`, or None.
    """

    def draw(row: Any) -> Point | None:
        if row is None:
            return None
        tip = f"{format_mean_kld(row.kld_mean, row.kld_se)}, perplexity ratio {row.ppl_ratio:.4f}"
        return Point(row.kld_mean or None, tip, row.kld_se)  # a logarithm of zero is a gap

    curves = [
        Curve(label, style, [draw(row) for _, row in zip_longest(places, rows)])
        for label, style, rows in series
    ]
    klds = [row.kld_mean for _, _, rows in series for row in rows if row is not None]
    y = log_axis("mean KLD, nats", klds, low=low, high=low + 5)
    return place_chart(title, places, curves, x_title=x_title, y=y)


def histogram(row: HistogramResult, anchor: str) -> Figure:
    """Draw the magnitudes of a site in units of its scale, and the range that FP8 covers.

    Outside of the range the ground is shaded; dashed lines are the ends of that of scale 1.0.
    """
    shift, total = math.log2(row.scale), sum(row.counts)
    title = f"log2(|x| / scale); zero below {row.smallest:.2g}, clips above {row.largest:.4g}"
    ticks = [(float(value), str(value)) for value in range(-12, 15, 4)]
    x = Axis(title=title, low=-16.0, high=14.0, ticks=ticks)  # e4m3 covers -10 to 8.8 of it
    y = log_axis("share of values", [], low=-7, high=0)
    bins: dict[float, float] = {}
    for edge, count in zip(row.lower_edges_log2, row.counts, strict=True):
        at = min(max(edge - shift, x.low), x.high - _BIN_OCTAVES)  # the ends hold what is beyond
        bins[at] = bins.get(at, 0) + count / total
    steps = f"M{x.x(min(bins)):.1f} {FLOOR}"
    for at, share in bins.items():
        steps += f"V{y.y(share) if share else FLOOR:.1f}H{x.x(at + _BIN_OCTAVES):.1f}"
    inside = [math.log2(end) - shift for end in (row.smallest, row.largest)]
    outside = ((LEFT, x.x(inside[0])), (x.x(inside[1]), RIGHT))
    parts = [_path(f"M{a:.1f} {TOP}H{b:.1f}V{FLOOR}H{a:.1f}z", "lost") for a, b in outside]
    parts += _draw_grid(y)
    parts += [_text(x.x(v), FLOOR + 15, name, "middle") for v, name in x.ticks]
    parts.append(_text((LEFT + RIGHT) / 2, FLOOR + 32, x.title, "middle"))
    parts.append(_path(f"{steps}V{FLOOR}z", "bar c0"))
    unscaled = [end - shift for end in inside if x.low < end - shift < x.high]
    parts += [_path(f"M{x.x(end):.1f} {TOP}V{FLOOR}", "limit") for end in unscaled]
    return Figure(title=row.site, chart=_join(row.site, parts), anchor=anchor)


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
