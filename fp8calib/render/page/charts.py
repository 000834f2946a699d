"""Charts as SVG elements: their colours and fonts are those of page.css."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element, tostring

from fp8calib.render.page.series import Style

WIDTH, HEIGHT = 440, 230
LEFT, RIGHT, TOP, BOTTOM = 56, 8, 24, 38
"""Margins around the area of the data, in units of the view box."""
BIN_OCTAVES = 1 / 8
_MOST_TICKS = 10
_MOST_LARGE_MARKS = 40
_STEPS = (1, 2, 5, 10, 20, 50, 100, 200, 500)
_MARKS = {
    "\N{BLACK CIRCLE}": "m-{r} 0a{r} {r} 0 1 0 {d} 0a{r} {r} 0 1 0-{d} 0",
    "\N{BLACK SQUARE}": "m-{r}-{r}h{d}v{d}h-{d}z",
    "\N{BLACK UP-POINTING TRIANGLE}": "m0-{r}l{r} {d}h-{d}z",
    "\N{BLACK DIAMOND}": "m0-{r}l{r} {r}l-{r} {r}l-{r}-{r}z",
    "\N{HEAVY PLUS SIGN}": "m-{r} 0h{d}m-{r}-{r}v{d}",
    "\N{BLACK DOWN-POINTING TRIANGLE}": "m-{r}-{r}h{d}l-{r} {d}z",
    "\N{MULTIPLICATION X}": "m-{r}-{r}l{d} {d}m0-{d}l-{d} {d}",
}
"""The path of each mark around its point; r is its radius, d its diameter."""


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
        low, high = self._scale(self.low), self._scale(self.high)
        share = (self._scale(min(max(value, self.low), self.high)) - low) / (high - low)
        return start + share * (end - start)

    def _scale(self, value: float) -> float:
        return math.log10(value) if self.is_log else value

    def y(self, value: float) -> float:
        """Give the height of a value in a chart."""
        return self.place(value, HEIGHT - BOTTOM, TOP)


def linear_axis(
    title: str, values: Iterable[float | None], *, low: float, high: float, step: float
) -> Axis:
    """Make an axis from `low` to `high`, longer where `values` need it."""
    known = _list_finite(values)
    low = min(low, *(math.floor(v / step) * step for v in known), high)
    high = max(high, *(math.ceil(v / step) * step for v in known), low)
    step *= next(by for by in (*_STEPS, math.inf) if (high - low) / (step * by) <= _MOST_TICKS)
    ticks = [(low + step * n, f"{low + step * n:g}") for n in range(int((high - low) / step) + 1)]
    return Axis(title=title, low=low, high=high, ticks=ticks)


def log_axis(
    title: str, values: Iterable[float | None], *, low: int, high: int, as_percent: bool = False
) -> Axis:
    """Make an axis from 10**low to 10**high, longer upwards where `values` need it.

    What is smaller is drawn at its lower end, whose tick says so.
    """
    above = max((math.ceil(math.log10(v)) for v in _list_finite(values) if v > 0), default=high)
    high = max(high, above)
    every = math.ceil((high - low) / 7)
    ticks = [(10.0**n, _name_power(n, as_percent)) for n in range(low, high + 1, every)]
    ticks[0] = (ticks[0][0], f"\N{LESS-THAN OR EQUAL TO} {ticks[0][1]}")
    title += ", %" if as_percent else ""
    return Axis(title=title, low=10.0**low, high=10.0**high, ticks=ticks, is_log=True)


def _name_power(exponent: int, as_percent: bool) -> str:
    exponent += 2 * as_percent
    return f"{10.0**exponent:g}" if -4 < exponent < 5 else f"1e{exponent}"


def _list_finite(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A value across which a chart draws a dashed line."""

    value: float
    text: str
    is_floor: bool = False
    """Good values are above the line; its text is below."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """One line of a chart; None in `values` is a gap."""

    style: Style
    values: Sequence[float | None]
    group: str = ""


def line_chart(
    label: str,
    names: Sequence[str],
    lines: Sequence[Curve],
    *,
    x_title: str,
    y: Axis,
    limits: Sequence[Limit] = (),
    hover: Sequence[str] = (),
) -> Element:
    """Draw lines with marks, over the places `names`.

    Args:
        label: what the chart shows, for screen readers.
        names: what stands below each place of the horizontal axis.
        lines: values, one for each place.
        x_title: the name of the horizontal axis.
        y: the vertical axis.
        limits: the dashed lines.
        hover: what a pointer shows at each place.
    """
    xs = _spread(len(names))
    drawn = [_draw_line(line, xs, y) for line in lines]
    return _chart(
        label,
        *_draw_grid(y),
        *_draw_names(names, xs, x_title),
        *(part for limit in limits for part in _draw_limit(limit, y)),
        *drawn,
        *_draw_hover(xs, hover),
    )


def bar_chart(
    label: str,
    names: Sequence[str],
    values: Sequence[float | None],
    colors: Sequence[str],
    *,
    x_title: str,
    y: Axis,
    hover: Sequence[str] = (),
) -> Element:
    """Draw a bar for each place; `colors` are classes of page.css."""
    xs = _spread(len(names))
    width = _find_step(xs) * 0.7
    bars = [
        _element(
            "path",
            d=f"M{_n(x - width / 2)} {HEIGHT - BOTTOM}V{_n(y.y(value))}h{_n(width)}"
            f"V{HEIGHT - BOTTOM}z",
            class_=f"bar {color}",
        )
        for x, value, color in zip(xs, values, colors, strict=True)
        if value is not None and math.isfinite(value) and value > y.low
    ]
    grid, below = _draw_grid(y), _draw_names(names, xs, x_title)
    return _chart(label, *grid, *below, *bars, *_draw_hover(xs, hover))


def _chart(label: str, *parts: Element, height: int = HEIGHT) -> Element:
    box = f"0 0 {WIDTH} {height}"
    return _element("svg", *parts, viewBox=box, role="img", aria_label=label)


def heat_map(
    label: str,
    columns: Sequence[str],
    rows: Sequence[str],
    cells: Sequence[Sequence[tuple[str, str] | None]],
    *,
    x_title: str,
) -> Element:
    """Draw a cell for each row and column: its class of page.css and what a pointer shows."""
    left, line, top = 128, 18, 4
    height = top + line * len(rows) + BOTTOM
    width = (WIDTH - RIGHT - left) / max(len(columns), 1)
    parts: list[Element] = []
    for name, found in zip(rows, cells, strict=True):
        parts.append(_text(left - 6, top + line / 2 + 4, name, "end"))
        for column, cell in enumerate(found):
            if cell is not None:
                place = {"x": _n(left + width * column), "y": _n(top)}
                size = {"width": _n(width), "height": _n(line - 1)}
                tip = _element("title", cell[1])
                parts.append(_element("rect", tip, class_=cell[0], **place, **size))
        top += line
    xs = [left + width * (column + 0.5) for column in range(len(columns))]
    below = _draw_names(columns, xs, x_title, bottom=height - BOTTOM)
    return _chart(label, *parts, *below, height=height)


def scatter_chart(
    label: str, points: Sequence[tuple[float, float, Style, str]], *, x: Axis, y: Axis
) -> Element:
    """Draw marks: x, y, style, and what a pointer shows of each."""
    left, right = LEFT, WIDTH - RIGHT
    marks = []
    for across, up, style, hover in points:
        shape = _MARKS[style.glyph].format(r=4, d=8)
        place = f"M{_n(x.place(across, left, right))} {_n(y.y(up))}"
        dot = _element("path", _element("title", hover), d=f"{place}{shape}", class_="marks")
        marks.append(_element("g", dot, class_=style.color))
    return _chart(
        label,
        *_draw_grid(y),
        *_draw_x(x),
        *marks,
    )


def _draw_x(axis: Axis) -> Iterator[Element]:
    left, right = LEFT, WIDTH - RIGHT
    for value, name in axis.ticks:
        yield _text(axis.place(value, left, right), HEIGHT - BOTTOM + 15, name, "middle")
    yield _text((left + right) / 2, HEIGHT - 6, axis.title, "middle")


def histogram(
    label: str, bins: Sequence[tuple[float, float]], *, x: Axis, y: Axis, inside: tuple[float, ...]
) -> Element:
    """Draw shares by magnitude.

    Args:
        label: what the chart shows, for screen readers.
        bins: the lower edge of each bin, in octaves, and its share; it ends where the next begins.
        x: the magnitudes.
        y: the shares.
        inside: the two ends of the range of the format; outside of it the ground is shaded.
    """
    left, right = LEFT, WIDTH - RIGHT
    first, last = (x.place(end, left, right) for end in inside)
    shades = [
        _element(
            "path", d=f"M{_n(start)} {TOP}H{_n(end)}V{HEIGHT - BOTTOM}H{_n(start)}z", class_="lost"
        )
        for start, end in ((left, first), (last, right))
    ]
    steps = [f"M{_n(x.place(bins[0][0], left, right))} {HEIGHT - BOTTOM}"] if bins else []
    ends = [*(edge for edge, _ in bins[1:]), *(edge + BIN_OCTAVES for edge, _ in bins[-1:])]
    for (_, share), end in zip(bins, ends, strict=True):
        at = y.y(share) if share > y.low else HEIGHT - BOTTOM
        steps.append(f"V{_n(at)}H{_n(x.place(end, left, right))}")
    bars = _element("path", d="".join([*steps, f"V{HEIGHT - BOTTOM}z"]), class_="bar c0")
    return _chart(
        label,
        *shades,
        *_draw_grid(y),
        *_draw_x(x),
        bars,
    )


def _spread(count: int) -> list[float]:
    step = (WIDTH - RIGHT - LEFT) / max(count, 1)
    return [LEFT + step * (index + 0.5) for index in range(count)]


def _find_step(xs: Sequence[float]) -> float:
    return xs[1] - xs[0] if len(xs) > 1 else float(WIDTH - RIGHT - LEFT)


def _draw_grid(y: Axis) -> list[Element]:
    lines = "".join(f"M{LEFT} {_n(y.y(value))}H{WIDTH - RIGHT}" for value, _ in y.ticks)
    names = [_text(LEFT - 6, y.y(value) + 4, name, "end") for value, name in y.ticks]
    title = _text(LEFT - 6, 12, y.title, "start")
    return [_element("path", d=lines, class_="grid"), *names, title]


def _draw_names(
    names: Sequence[str], xs: Sequence[float], title: str, *, bottom: float = HEIGHT - BOTTOM
) -> list[Element]:
    """Write names below a chart, as many as there is space for."""
    longest = max(map(len, names), default=1)
    fits = max(1, int((WIDTH - LEFT) / (9 * longest + 8)))
    every = next(by for by in (*_STEPS, len(names)) if len(names) / by <= fits)
    shown = [
        _text(x, bottom + 15, name, "middle")
        for x, name in list(zip(xs, names, strict=True))[::every]
    ]
    middle = (xs[0] + xs[-1]) / 2 if xs else WIDTH / 2
    return [*shown, _text(middle, bottom + 32, title, "middle")]


def _draw_limit(limit: Limit, y: Axis) -> list[Element]:
    at = y.y(limit.value)
    line = _element("path", d=f"M{LEFT} {_n(at)}H{WIDTH - RIGHT}", class_="limit")
    below = at + (13 if limit.is_floor else -4)
    return [line, _text(WIDTH - RIGHT - 2, below, limit.text, "end", "limit-name")]


def _draw_line(line: Curve, xs: Sequence[float], y: Axis) -> Element:
    radius = 3.2 if len(xs) <= _MOST_LARGE_MARKS else 2.0
    points: list[str] = []
    marks: list[str] = []
    is_open = False
    shape = _MARKS[line.style.glyph].format(r=_n(radius), d=_n(2 * radius))
    for x, value in zip(xs, line.values, strict=True):
        if value is None or not math.isfinite(value):
            is_open = False
            continue
        place = f"{_n(x)} {_n(y.y(value))}"
        points.append(f"{'L' if is_open else 'M'}{place}")
        marks.append(f"M{place}{shape}")
        is_open = True
    drawn = _element("path", d="".join(points), class_="line")
    if line.style.dash:
        drawn.set("stroke-dasharray", line.style.dash)
    dots = _element("path", d="".join(marks), class_="marks")
    return _element("g", drawn, dots, class_=f"{line.style.color} {line.group}".strip())


def _draw_hover(xs: Sequence[float], texts: Sequence[str]) -> list[Element]:
    """Lay a strip over each place, which shows a text to a pointer."""
    step = _find_step(xs)
    return [
        _element(
            "path",
            _element("title", text),
            d=f"M{_n(x - step / 2)} {TOP}h{_n(step)}V{HEIGHT - BOTTOM}h-{_n(step)}z",
            class_="hover",
        )
        for x, text in zip(xs, texts, strict=False)
    ]


def _element(tag: str, *children: Element | str, **attributes: str) -> Element:
    """Make an element of other elements, or of a text, which the serializer escapes.

    `class_` means class, other underscores in names mean hyphens.
    """
    names = {name: name.rstrip("_").replace("_", "-") for name in attributes}
    made = Element(tag, {names[name]: value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        else:
            made.text = child
    return made


def measure(chart: Element) -> int:
    """Give the size of a chart on the page, in bytes."""
    return len(tostring(chart, encoding="utf-8", method="html"))


def _text(x: float, y: float, text: str, anchor: str, kind: str = "") -> Element:
    made = _element("text", text, x=_n(x), y=_n(y), text_anchor=anchor)
    if kind:
        made.set("class", kind)
    return made


def _n(value: float) -> str:
    """Write a coordinate with a tenth of a unit, as short as possible."""
    return f"{value:.1f}".removesuffix(".0")
