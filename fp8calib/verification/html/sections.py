"""The sections of plots of a report, and the plots that are not per tensor."""

from __future__ import annotations

from collections.abc import Sequence

from fp8calib.verification.html.histograms import histograms_section
from fp8calib.verification.html.kv_plots import ROLE_NAMES, cache_sections
from fp8calib.verification.html.linear_maps import linears_section
from fp8calib.verification.html.plots import (
    BASELINE,
    BLUE,
    GREEN,
    INK,
    RED,
    STYLES,
    Json,
    PageSection,
    Plot,
    View,
    finite,
    layer_axis,
    line,
    log_axis,
    make_layout,
    make_series,
    own_legend,
    plain,
    title,
)
from fp8calib.verification.report import (
    DiagnosisResult,
    RuleResult,
    Sensitivity,
    SensitivityResult,
    VerifyReport,
)


def make_sections(report: VerifyReport) -> tuple[PageSection, ...]:
    """Make the sections that the report has data for, in reading order."""
    series = make_series(report)
    sections = (
        *cache_sections(report, series),
        linears_section(report.layers, series),
        _positions_section(report),
        histograms_section(report.histograms),
        _diagnosis_section(report.diagnosis),
        _sensitivity_section(report.sensitivity),
        _rules_section(report.rules),
    )
    return tuple(section for section in sections if section.plots or section.findings)


def _positions_section(report: VerifyReport) -> PageSection:
    traces = []
    for series, candidate in zip(make_series(report), report.candidates, strict=True):
        ranges = [_format_range(row.first, row.last) for row in candidate.by_position]
        klds = [finite(row.kld_mean, above=0) for row in candidate.by_position]
        more = {
            "customdata": [[row.tokens, row.ppl_ratio] for row in candidate.by_position],
            "hovertemplate": "positions %{x}: %{y:.3g} nats<br>%{customdata[0]} tokens, "
            "perplexity ratio %{customdata[1]:.4f}",
            "meta": series.name,
        }
        traces.append(line(series.label, series.style, ranges, klds, **more))
    x = {"title": title("token position"), "type": "category"}
    y = log_axis("mean KLD, nats", [kld for trace in traces for kld in trace["y"]])
    view = View(label="", data=traces, layout=make_layout(x=x, y=y))
    plot = Plot(name="positions", title="Mean KL divergence", views=[view], is_wide=True)
    return PageSection(
        title="KL divergence by position",
        lead="Where in a sequence predictions differ from the unquantized model's. Rising lines "
        "mean that errors in the KV cache accumulate with length.",
        plots=[plot] if any(any(trace["y"]) for trace in traces) else [],
    )


def _format_range(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}\N{EN DASH}{last}"


def _diagnosis_section(rows: Sequence[DiagnosisResult]) -> PageSection:
    roles = [role for role in ROLE_NAMES if any(row.site.endswith(f".{role}") for row in rows)]
    plots = []
    for role in roles:
        chosen = sorted((r for r in rows if r.site.endswith(f".{role}")), key=lambda r: r.layer)
        x = layer_axis(row.layer for row in chosen)
        layout = make_layout(x=x, y={"title": title("SQNR, dB")}, **own_legend())
        view = View(label="", data=_diagnosis_lines(chosen), layout=layout)
        plots.append(Plot(name=f"diagnosis-{role}", title=ROLE_NAMES[role], views=[view]))
    return PageSection(
        title="Are scales needed?",
        lead="What the tensors of each layer lose at scale 1.0, with one scale per tensor, and "
        "with one per head. Where the lines coincide, scales are not needed.",
        plots=plots,
    )


def _diagnosis_lines(rows: Sequence[DiagnosisResult]) -> Sequence[Json]:
    layers = [row.layer for row in rows]
    losses = [[row.unscaled_clipped, row.unscaled_flushed] for row in rows]
    shares = "<br>%{customdata[0]:.3~%} clipped, %{customdata[1]:.3~%} flushed"
    hover = "layer %{x}: %{y:.2f} dB"
    unscaled = [finite(row.unscaled_db) for row in rows]
    more = {"customdata": losses, "hovertemplate": hover + shares}
    lines = [line("scale 1.0", BASELINE, layers, unscaled, **more)]
    kinds = (
        ("one scale per tensor", STYLES[0], [finite(row.scaled_db) for row in rows]),
        ("one scale per head", STYLES[2], [finite(row.per_head_db) for row in rows]),
    )
    for name, style, values in kinds:
        if any(value is not None for value in values):
            lines.append(line(name, style, layers, values, hovertemplate=hover))
    return lines


def _sensitivity_section(sensitivity: Sensitivity | None) -> PageSection:
    heading = "Sensitivity: one layer quantized at a time"
    if sensitivity is None or not sensitivity.layers:
        return PageSection(title=heading, lead="", plots=[])
    skipped = set(sensitivity.skip_layers)
    bars = [
        _bars([r for r in sensitivity.layers if r.layer in skipped], "leave unquantized", RED),
        _bars([r for r in sensitivity.layers if r.layer not in skipped], "quantize", BLUE),
    ]
    x = layer_axis(row.layer for row in sensitivity.layers)
    layout = make_layout(x=x, y={"title": title("mean KLD, nats")}, **own_legend())
    view = View(label="", data=[bar for bar in bars if bar["x"]], layout=layout)
    plot = Plot(name="sensitivity", title=sensitivity.candidate, views=[view], is_wide=True)
    advice = "No layer is worth leaving unquantized: none stands out."
    if sensitivity.flag:
        advice = f"To leave the layers that stand out unquantized, use {sensitivity.flag}"
    count = f"Mean KL divergence over {sensitivity.sequences} sequences"
    return PageSection(title=heading, lead=f"{count}.", plots=[plot], findings=[advice])


def _bars(rows: Sequence[SensitivityResult], name: str, color: str) -> Json:
    return {
        "type": "bar",
        "name": name,
        "x": [row.layer for row in rows],
        "y": [finite(row.kld_mean) for row in rows],
        "customdata": [row.ppl_ratio for row in rows],
        "marker": {"color": color},
        "hovertemplate": "layer %{x}: %{y:.3g} nats, perplexity ratio %{customdata:.4f}",
    }


def _rules_section(rules: Sequence[RuleResult]) -> PageSection:
    names = [plain(f"{rank}. {row.rule}") for rank, row in enumerate(rules, start=1)]
    points = {
        "type": "scatter",
        "mode": "markers",
        "name": "",
        "x": [finite(row.ppl_ratio) for row in rules],
        "y": names,
        "error_x": {"array": [finite(row.ppl_ratio_se) for row in rules], "color": GREEN},
        "marker": {"color": GREEN, "size": 10},
        "customdata": [[plain(row.candidate), row.kld_mean] for row in rules],
        "hovertemplate": "%{y}: %{x:.4f}, KLD %{customdata[1]:.3g}<br>%{customdata[0]}",
    }
    y = {"type": "category", "autorange": "reversed"}
    one = {"type": "line", "x0": 1, "x1": 1, "yref": "paper", "y0": 0, "y1": 1, "layer": "below"}
    shapes = [{**one, "line": {"color": INK, "width": 1, "dash": "dash"}}]
    layout = make_layout(x={"title": title("perplexity ratio \u00b1 se")}, y=y, shapes=shapes)
    view = View(label="", data=[points], layout=layout)
    height = 110 + 34 * len(rules)
    plot = Plot(name="rules", title="Perplexity ratio", views=[view], height=height, is_wide=True)
    lead = "On the text of this verification, best first. The dashed line means no change."
    return PageSection(title="Scale rules", lead=lead, plots=[plot] if rules else [])
