"""The sections of a page: what they are made of, and those that are not about single tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from fp8calib.blocks import Table
from fp8calib.errors import format_ranges
from fp8calib.render.page.charts import (
    Curve,
    Limit,
    bar_chart,
    line_chart,
    linear_axis,
    log_axis,
)
from fp8calib.render.page.series import BASELINE, STYLES, Style, make_series
from fp8calib.verification.figures import format_db, format_mean_kld
from fp8calib.verification.judge.damaged import LEAST_DB
from fp8calib.verification.report import (
    SCALE_ONE,
    DiagnosisResult,
    RunProvenance,
    Sensitivity,
    VerifyReport,
)

ROLE_NAMES = {"k": "Keys", "v": "Values", "q": "Queries"}
DB_LIMIT = Limit(value=LEAST_DB, text=f"below {LEAST_DB:.0f} dB the tensor is lost", is_floor=True)
"""The limit of every axis of SQNR."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One chart with its title."""

    title: str
    chart: Element
    legend: Sequence[tuple[Style, str]] = ()
    """Its own; without one, it draws the page's series."""
    anchor: str = ""
    """Its id on the page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PageSection:
    """Figures that answer one question."""

    title: str
    lead: str
    """How to read them."""
    figures: Sequence[Figure] = ()
    findings: Sequence[str] = ()
    """Sentences above the figures."""
    table: Table | None = None
    is_folded: bool = True

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to show."""
        return not (self.figures or self.findings or self.table is not None)


def needs_section(report: VerifyReport) -> PageSection:
    """Answer whether scales are needed, with what K and V of each layer lose at scale 1.0."""
    figures, findings = [], []
    sites = () if report.kv is None else report.kv.sites
    for role, name in ROLE_NAMES.items():
        if any(row.role == role and row.candidate == SCALE_ONE for row in report.layers):
            unfit = {row.layer for row in report.diagnosis if row.site in sites and _has(row, role)}
            findings.append(_describe_needs(name, sorted(unfit)))
        chosen = sorted(
            (row for row in report.diagnosis if _has(row, role)),
            key=lambda row: row.layer,
        )
        if chosen:
            figures.append(_draw_needs(name, chosen))
    return PageSection(
        title="Are scales needed?",
        lead=_LOSSES_AT_ONE if _has_one_kind(report) else _LOSSES_BY_KIND,
        figures=figures,
        findings=findings,
        is_folded=False,
    )


_LOSSES_AT_ONE = (
    "What K, V and q of each layer lose at scale 1.0, and with a power of two that fits the "
    "tensor. Where the lines coincide, no scale is needed."
)
_LOSSES_BY_KIND = (
    "What K, V and q of each layer lose at scale 1.0, with a power of two that fits the tensor, "
    "with one scale per tensor, and with one per head. Where lines coincide, no scale is needed."
)


def _has(row: DiagnosisResult, role: str) -> bool:
    return row.site.endswith(f".{role}")


def _has_one_kind(report: VerifyReport) -> bool:
    return all(row.scaled_db is None and row.per_head_db is None for row in report.diagnosis)


def _describe_needs(name: str, lost: Sequence[int]) -> str:
    if not lost:
        return f"{name}: scale 1.0 fits every layer."
    layers = "layer" if len(lost) == 1 else "layers"
    return f"{name}: scale 1.0 does not fit {layers} {format_ranges(lost)}."


def _draw_needs(name: str, rows: Sequence[DiagnosisResult]) -> Figure:
    kinds = {
        "scale 1.0": (BASELINE, [row.unscaled_db for row in rows]),
        "fitted power of two": (STYLES[1], [row.fitted_db for row in rows]),
        "per tensor": (STYLES[0], [row.scaled_db for row in rows]),
        "per head": (STYLES[2], [row.per_head_db for row in rows]),
    }
    known = {label: kind for label, kind in kinds.items() if any(v is not None for v in kind[1])}
    hover = [
        f"layer {row.layer}\n"
        + "\n".join(f"{label}: {format_db(values[at])} dB" for label, (_, values) in known.items())
        + f"\nat scale 1.0: {row.unscaled_clipped:.2%} clipped, {row.unscaled_flushed:.2%} flushed"
        for at, row in enumerate(rows)
    ]
    drawn = [value for _, values in known.values() for value in values]
    return Figure(
        title=name,
        legend=[(style, label) for label, (style, _) in known.items()],
        chart=line_chart(
            f"{name}: signal to noise by layer",
            [str(row.layer) for row in rows],
            [Curve(style=style, values=values) for style, values in known.values()],
            x_title="layer",
            y=linear_axis("SQNR, dB", drawn, low=0, high=40, step=10),
            limits=[DB_LIMIT],
            hover=hover,
        ),
    )


def positions_section(report: VerifyReport) -> PageSection:
    """Draw the mean KL divergence by the position in a sequence."""
    longest = max(report.candidates, key=lambda one: len(one.by_position), default=None)
    ranges = longest.by_position if longest else ()
    klds = [
        [row.kld_mean for row in one.by_position if row.kld_mean is not None]
        for one in report.candidates
    ]
    figures = []
    if any(kld for each in klds for kld in each):
        y = log_axis("mean KLD, nats", [kld for each in klds for kld in each], low=-6, high=0)
        lines = [
            Curve(style=series.style, group=series.group, values=_fill(each, len(ranges)))
            for series, each in zip(make_series(report), klds, strict=True)
        ]
        hover = [
            f"positions {row.first}"
            + (f"\N{EN DASH}{row.last}" if row.last != row.first else "")
            + f", {row.tokens:,} tokens\n"
            + "\n".join(
                f"{one.name}: {format_mean_kld(each[at], one.by_position[at].kld_se)} nats"
                for one, each in zip(report.candidates, klds, strict=True)
                if at < len(each)
            )
            for at, row in enumerate(ranges)
        ]
        chart = line_chart(
            "mean KL divergence by position",
            [str(row.first) for row in ranges],
            lines,
            x_title="first position of the range",
            y=y,
            hover=hover,
        )
        figures.append(Figure(title="Mean KL divergence", chart=chart))
    return PageSection(
        title="KL divergence by position",
        lead="Where in a sequence predictions differ from the unquantized model's. Rising lines "
        "mean that errors in the KV cache accumulate with length.",
        figures=figures,
    )


def _fill(values: Sequence[float], count: int) -> list[float | None]:
    """Leave out zeros, which a logarithmic axis cannot show, and fill up to `count`."""
    known: list[float | None] = [value or None for value in values]
    return known + [None] * (count - len(known))


def sensitivity_section(sensitivity: Sensitivity | None) -> PageSection:
    """Draw what quantizing one layer alone costs, for each layer."""
    title = "Sensitivity: one layer quantized at a time"
    if sensitivity is None or not sensitivity.layers:
        return PageSection(title=title, lead="")
    rows = sorted(sensitivity.layers, key=lambda row: row.layer)
    colors = ["c1" if row.layer in sensitivity.skip_layers else "c0" for row in rows]
    klds = [row.kld_mean for row in rows]
    chart = bar_chart(
        "mean KL divergence by layer",
        [str(row.layer) for row in rows],
        klds,
        colors,
        x_title="layer",
        y=log_axis("mean KLD, nats", klds, low=-6, high=-1),
        hover=[
            f"layer {row.layer}: {format_mean_kld(row.kld_mean, row.kld_se)} nats, "
            f"perplexity ratio {row.ppl_ratio:.4f}"
            for row in rows
        ],
    )
    legend = [(STYLES[0], "quantize")]
    if sensitivity.skip_layers:
        legend.append((STYLES[1], "leave unquantized"))
    advice = "No layer is worth leaving unquantized: none stands out."
    if sensitivity.flag:
        advice = f"To leave the layers that stand out unquantized, use {sensitivity.flag}"
    return PageSection(
        title=title,
        lead=f"Mean KL divergence over {sensitivity.sequences} sequences.",
        figures=[Figure(title=sensitivity.candidate, chart=chart, legend=legend)],
        findings=[advice],
        is_folded=False,
    )


def list_provenance(origin: RunProvenance | None, facts: dict[str, str]) -> dict[str, str]:
    """List what figures come from: date, command, hashes and versions if known; other facts."""
    if origin is None:
        return facts
    return {
        "Date": origin.date,
        "Command": origin.command,
        "Hash of the model": origin.model_hash,
        "Hash of the text": origin.data_hash,
        **facts,
        "Versions": ", ".join(f"{name} {found}" for name, found in origin.versions.items()),
    }
