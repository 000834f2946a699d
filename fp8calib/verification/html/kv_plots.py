"""Plots of the KV cache by layer: one plot each for k, v and q, one line per candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter

from fp8calib.fp8.formats import E4M3FN, FP8_FORMATS
from fp8calib.verification.html.plots import (
    Json,
    PageSection,
    Plot,
    Series,
    View,
    finite,
    layer_axis,
    level,
    line,
    log_axis,
    make_layout,
    title,
)
from fp8calib.verification.report import LayerResult, VerifyReport

ROLE_NAMES = {"k": "Keys", "v": "Values", "q": "Queries"}
_LOSSES = {"clipped": "clipped", "flushed": "flushed to zero"}
_HOVER = (
    "<b>%{fullData.name}</b><br>layer %{x}: %{y:.4~g}<br>amax %{customdata[0]:.4~g}, "
    "scale %{customdata[1]:.4~g}<br>%{customdata[2]:.3~%} clipped, %{customdata[3]:.3~%} flushed"
    "<extra></extra>"
)

Measure = Callable[[LayerResult], float | None]
_ByRole = dict[str, list[LayerResult]]


def cache_sections(report: VerifyReport, series: Sequence[Series]) -> tuple[PageSection, ...]:
    """Make the sections on range, SQNR and lost values of the KV cache."""
    by_role: _ByRole = {}
    for role in ROLE_NAMES:
        if rows := [row for row in report.layers if row.role == role]:
            by_role[role] = rows
    return (
        _ranges_section(by_role, series, _find_limits(report)),
        _sqnr_section(by_role, series),
        _losses_section(by_role, series),
    )


def _ranges_section(
    by_role: _ByRole, series: Sequence[Series], limits: Sequence[tuple[float, str]]
) -> PageSection:
    drawn = [_amax_in_codes(row) for rows in by_role.values() for row in rows]
    marks = [level(value, text) for value, text in limits]
    layout: Json = {
        "y": log_axis("amax / scale", [*drawn, *(value for value, _ in limits)]),
        "shapes": [shape for shape, _ in marks],
        "annotations": [note for _, note in marks],
    }
    return PageSection(
        title="Range: amax over scale",
        lead="The largest magnitude of each layer, divided by its scale. Above the dashed line "
        "values clip; far below it small values are lost. At scale 1.0 this is amax itself.",
        plots=list(_draw_roles(by_role, series, "range", _amax_in_codes, layout)),
    )


def _amax_in_codes(row: LayerResult) -> float | None:
    return finite(row.amax / row.scale, above=0) if row.scale else None


def _find_limits(report: VerifyReport) -> Sequence[tuple[float, str]]:
    """Find the formats in use from the histograms; without any, e4m3fn, which engines store."""
    maxima = {round(row.largest / row.scale) for row in report.histograms}
    used = [fmt for fmt in FP8_FORMATS.values() if fmt.max in maxima] or [E4M3FN]
    return [(fmt.max, f"{fmt.max:.0f}: the largest {fmt.name}") for fmt in used]


def _sqnr_section(by_role: _ByRole, series: Sequence[Series]) -> PageSection:
    layout: Json = {"y": {"title": title("SQNR, dB")}}
    return PageSection(
        title="Signal to quantization noise of the KV cache",
        lead="Higher is better; 3 dB more is half the noise. A gap means that nothing was lost or "
        "that the tensor is all zeros.",
        plots=list(_draw_roles(by_role, series, "sqnr", lambda row: finite(row.sqnr_db), layout)),
    )


def _losses_section(by_role: _ByRole, series: Sequence[Series]) -> PageSection:
    plots: list[Plot] = []
    findings: list[str] = []
    for name, words in _LOSSES.items():
        share: Callable[[LayerResult], float] = attrgetter(name)
        lost = {role: rows for role, rows in by_role.items() if any(map(share, rows))}
        y = {"title": title(f"share {words}"), "tickformat": ".3~%", "rangemode": "tozero"}
        plots += _draw_roles(lost, series, name, share, {"y": y}, suffix=f": {words}")
        whole = [ROLE_NAMES[role] for role in by_role if role not in lost]
        findings += [f"{role}: nothing {words}, in any layer of any candidate." for role in whole]
    lead = "Shares of all elements. Too small a scale clips values; too large a scale flushes them."
    return PageSection(title="Values lost", lead=lead, plots=plots, findings=findings)


def _draw_roles(
    by_role: _ByRole,
    series: Sequence[Series],
    name: str,
    measure: Measure,
    layout: Json,
    *,
    suffix: str = "",
) -> Iterator[Plot]:
    """Draw a plot for each role; `layout` is that of the plots, without the axis of layers."""
    for role, rows in by_role.items():
        x = layer_axis(row.layer for row in rows)
        lines = [made for one in series if (made := _draw_line(rows, one, measure))]
        view = View(label="", data=lines, layout=make_layout(x=x, **layout))
        yield Plot(name=f"{name}-{role}", title=ROLE_NAMES[role] + suffix, views=[view])


def _draw_line(rows: Sequence[LayerResult], series: Series, measure: Measure) -> Json | None:
    chosen = sorted((r for r in rows if r.candidate == series.name), key=attrgetter("layer"))
    if not chosen:
        return None
    return line(
        series.label,
        series.style,
        [row.layer for row in chosen],
        [measure(row) for row in chosen],
        customdata=[[row.amax, row.scale, row.clipped, row.flushed] for row in chosen],
        hovertemplate=_HOVER,
        meta=series.name,
    )
