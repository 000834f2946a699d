"""A VerifyReport as one self-contained HTML page: it loads no other file, and needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

from fp8calib import __version__
from fp8calib.checkpoint.atomic import write_file_atomic
from fp8calib.errors import UsageError
from fp8calib.verification.html.markup import element, write_html
from fp8calib.verification.html.plots import PageSection, Plot, Series, make_series
from fp8calib.verification.html.sections import make_sections
from fp8calib.verification.html.tables import (
    candidates_table,
    list_facts,
    list_verdicts,
    rules_table,
    tasks_table,
)
from fp8calib.verification.report import VerifyReport

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:; base-uri 'none'; form-action 'none'"
)
"""The browser refuses to load anything from elsewhere; images are those that plotly.js saves."""


def require_plotly() -> None:
    """Require plotly to be installed; called before a run that may take hours.

    Raises:
        UsageError: it is not installed.
    """
    if find_spec("plotly") is None:
        raise UsageError(
            "--report: plotly, which draws the page, is not installed",
            hint="pip install 'fp8calib[report]'",
        )


def write_page(report: VerifyReport, path: Path) -> None:
    """Write the page atomically; an existing file is replaced.

    Raises:
        UsageError: plotly is not installed, or the path cannot be a file.
        ExportError: the file cannot be written.
    """
    require_plotly()
    from plotly.offline import get_plotlyjs  # noqa: PLC0415 -- an extra that only the page needs

    write_file_atomic(path, render_page(report, get_plotlyjs()).encode("utf-8", "replace"))


def render_page(report: VerifyReport, plotly_js: str) -> str:
    """Render the page as HTML; `plotly_js` is the source of plotly.js, which it embeds once."""
    sections = make_sections(report)
    plots = [plot for section in sections for plot in section.plots]
    legend = [_render_legend(make_series(report))] if plots else []
    drawn = [_render_section(section) for section in sections]
    if report.rules:
        drawn.append(_render_table("", rules_table(report.rules)))
    if report.tasks:
        drawn.append(_render_table("Tasks", tasks_table(report.tasks)))
    main = element("main", *_list_results(report), *legend, *drawn, _render_footer(report))
    data = element("script", _to_json(plots), id="plots", type="application/json")
    code = [element("script", source) for source in (plotly_js, _read_resource("page.js"))]
    body = element("body", main, data, *code)
    return write_html(element("html", _render_head(report), body, lang="en"))


def _render_head(report: VerifyReport) -> Element:
    return element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"FP8 verification of {report.model}"),
        element("style", _read_resource("page.css")),
    )


def _list_results(report: VerifyReport) -> Sequence[Element]:
    """Render what precedes the plots: the conclusion, its numbers, and warnings."""
    advice = element("p", report.advice, class_="advice")
    parts = [
        element("h1", element("small", "FP8 verification"), report.model),
        list_facts(report),
        element("div", advice, list_verdicts(report), class_="card"),
        element("div", id="problem", class_="card", role="alert", hidden=""),
        _render_table("Candidates", candidates_table(report)),
    ]
    if report.warnings:
        items = element("ul", *(element("li", warning) for warning in report.warnings))
        parts.append(element("div", element("h2", "Warnings"), items, class_="card warnings"))
    return parts


def _render_table(heading: str, table: Element) -> Element:
    return element("section", *([element("h2", heading)] if heading else []), table)


def _render_legend(series: Sequence[Series]) -> Element:
    """Render the legend; a click on a candidate shows or hides it on all plots."""
    buttons = [
        element(
            "button",
            element("span", one.style.glyph, style=f"color:{one.style.color}", aria_hidden="true"),
            f" {one.label}",
            type="button",
            title=f"{one.name}: show or hide",
            aria_pressed="true",
            data_name=one.name,
        )
        for one in series
    ]
    return element("div", *buttons, id="legend", role="group", aria_label="Candidates shown")


def _render_section(section: PageSection) -> Element:
    parts = [element("h2", section.title), element("p", section.lead, class_="lead")]
    if section.plots:
        parts.append(element("div", *map(_render_plot, section.plots), class_="plots"))
    if section.findings:
        items = [element("li", finding) for finding in section.findings]
        parts.append(element("ul", *items, class_="findings"))
    return element("section", *parts)


def _render_plot(plot: Plot) -> Element:
    caption = element("figcaption", element("span", plot.title), *_render_choice(plot))
    place = element("div", id=plot.name, style=f"height:{plot.height}px")
    return element("figure", caption, place, class_="wide" if plot.is_wide else "half")


def _render_choice(plot: Plot) -> Sequence[Element]:
    """Render the choice between a plot's views: a list, and buttons to step through it."""
    if len(plot.views) <= 1:
        return [element("span", view.label) for view in plot.views if view.label]
    options = (element("option", view.label) for view in plot.views)
    return [
        element("select", *options, aria_label=f"{plot.title}: choose a view", autocomplete="off"),
        element("button", "\N{LEFTWARDS ARROW}", type="button", aria_label="previous"),
        element("button", "\N{RIGHTWARDS ARROW}", type="button", aria_label="next"),
    ]


def _render_footer(report: VerifyReport) -> Element:
    text = f"fp8calib {__version__}, on {report.device}, in {report.duration_s:.0f} s. "
    units = "KLD: Kullback-Leibler divergence from the unquantized model, in nats. "
    return element("footer", text + units + "\N{PLUS-MINUS SIGN}: one standard error.")


def _to_json(plots: Sequence[Plot]) -> str:
    """Encode the data of page.js, without characters that HTML would interpret."""
    data = _without_infinities([plot.to_json() for plot in plots])
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _without_infinities(data: Any) -> Any:
    """Replace NaN and infinities, which JSON does not have, by null."""
    if isinstance(data, dict):
        return {key: _without_infinities(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_without_infinities(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def _read_resource(name: str) -> str:
    return files("fp8calib.verification.html").joinpath(name).read_text(encoding="utf-8")
