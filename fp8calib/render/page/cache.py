"""The KV cache by layer: a chart each for k, v and q, a line for each candidate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

from fp8calib.fp8.formats import E4M3FN, FP8_FORMATS
from fp8calib.render.page.charts import Axis, Curve, Limit, line_chart, linear_axis, log_axis
from fp8calib.render.page.sections import DB_LIMIT, ROLE_NAMES, Figure, PageSection
from fp8calib.render.page.series import Series
from fp8calib.verification.figures import format_db
from fp8calib.verification.judge.damaged import FLUSHED, MOST_CLIPPED
from fp8calib.verification.report import LayerResult, VerifyReport

_Measure = Callable[[LayerResult], float | None]
_ByRole = dict[str, list[LayerResult]]


def cache_sections(report: VerifyReport, series: Sequence[Series]) -> tuple[PageSection, ...]:
    """Make the sections on SQNR, range and lost values of the KV cache."""
    by_role: _ByRole = {}
    for role in ROLE_NAMES:
        if rows := [row for row in report.layers if row.role == role]:
            by_role[role] = rows
    return (
        _sqnr_section(by_role, series),
        _ranges_section(by_role, series, _find_limits(report)),
        _losses_section(by_role, series),
    )


def _sqnr_section(by_role: _ByRole, series: Sequence[Series]) -> PageSection:
    drawn = [row.sqnr_db for rows in by_role.values() for row in rows]
    y = linear_axis("SQNR, dB", drawn, low=0, high=40, step=10)
    return PageSection(
        title="Signal to quantization noise of the KV cache",
        lead="Higher is better; 3 dB more is half the noise. A gap means that nothing was lost or "
        "that the tensor is all zeros.",
        figures=list(_draw_roles(by_role, series, lambda row: row.sqnr_db, y, [DB_LIMIT])),
    )


def _ranges_section(
    by_role: _ByRole, series: Sequence[Series], limits: Sequence[Limit]
) -> PageSection:
    drawn = [_amax_in_codes(row) for rows in by_role.values() for row in rows]
    y = log_axis("amax / scale", drawn, low=-2, high=4)
    return PageSection(
        title="Range: amax over scale",
        lead="The largest magnitude of each layer, divided by its scale. Above the dashed line "
        "values clip; far below it small values are lost. At scale 1.0 this is amax itself.",
        figures=list(_draw_roles(by_role, series, _amax_in_codes, y, limits)),
    )


def _amax_in_codes(row: LayerResult) -> float | None:
    if not row.scale:
        return None
    codes = row.amax / row.scale
    return codes if codes > 0 and math.isfinite(codes) else None


def _find_limits(report: VerifyReport) -> list[Limit]:
    """Find the formats in use from the histograms; without any, e4m3fn, which engines store."""
    maxima = {round(row.largest / row.scale) for row in report.histograms}
    used = [fmt for fmt in FP8_FORMATS.values() if fmt.max in maxima] or [E4M3FN]
    return [Limit(value=fmt.max, text=f"{fmt.max:.0f}: the largest {fmt.name}") for fmt in used]


def _losses_section(by_role: _ByRole, series: Sequence[Series]) -> PageSection:
    figures: list[Figure] = []
    findings: list[str] = []
    kinds: tuple[tuple[str, Callable[[LayerResult], float], float, str], ...] = (
        ("clipped", lambda row: row.clipped, MOST_CLIPPED, "no verdict is good"),
        ("flushed to zero", lambda row: row.flushed, FLUSHED, "a low SQNR is damage"),
    )
    for words, share, limit, rule in kinds:
        lost = {role: rows for role, rows in by_role.items() if any(map(share, rows))}
        y = log_axis(f"share {words}", [], low=-6, high=0, as_percent=True)
        limits = [Limit(value=limit, text=f"above {limit:.0%} {rule}")]
        figures += _draw_roles(lost, series, share, y, limits, suffix=f": {words}")
        whole = [ROLE_NAMES[role] for role in by_role if role not in lost]
        findings += [f"{role}: nothing {words}, in any layer of any candidate." for role in whole]
    lead = "Shares of all elements. Too small a scale clips values; too large a scale flushes them."
    return PageSection(title="Values lost", lead=lead, figures=figures, findings=findings)


def _draw_roles(
    by_role: _ByRole,
    series: Sequence[Series],
    measure: _Measure,
    y: Axis,
    limits: Sequence[Limit],
    *,
    suffix: str = "",
) -> Iterator[Figure]:
    """Draw a chart for each role."""
    for role, rows in by_role.items():
        layers = sorted({row.layer for row in rows})
        found = {(row.candidate, row.layer): row for row in rows}
        shown = [one for one in series if any(row.candidate == one.name for row in rows)]
        lines = [
            Curve(
                style=one.style,
                group=one.group,
                values=[_measure_at(found, one.name, layer, measure) for layer in layers],
            )
            for one in shown
        ]
        hover = [_describe_layer(found, shown, layer) for layer in layers]
        title = ROLE_NAMES[role] + suffix
        names = [str(layer) for layer in layers]
        chart = line_chart(
            f"{title}: {y.title} by layer",
            names,
            lines,
            x_title="layer",
            y=y,
            limits=limits,
            hover=hover,
        )
        yield Figure(title=title, chart=chart)


def _measure_at(
    found: dict[tuple[str, int], LayerResult], name: str, layer: int, measure: _Measure
) -> float | None:
    row = found.get((name, layer))
    return None if row is None else measure(row)


def _describe_layer(
    found: dict[tuple[str, int], LayerResult], series: Sequence[Series], layer: int
) -> str:
    rows = [(one, row) for one in series if (row := found.get((one.name, layer)))]
    described = [
        f"{one.label}: {format_db(row.sqnr_db)} dB, amax {row.amax:.4g}, scale "
        f"{'dynamic' if row.scale is None else f'{row.scale:.4g}'}, {row.clipped:.3%} clipped, "
        f"{row.flushed:.3%} flushed"
        for one, row in rows
    ]
    return "\n".join([f"layer {layer}", *described])
