"""The templates of pages: Markdown, and HTML, in which all text is escaped."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fp8calib.blocks import Table


def _make_environment(*, escapes: bool) -> Environment:
    return Environment(
        loader=PackageLoader(__package__, ""),
        autoescape=escapes,  # noqa: S701 -- Markdown is not escaped
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )


def _make_markdown_table(table: Table) -> str:
    """Write a table as Markdown."""
    rows = ([cell.replace("|", r"\|") for cell in row] for row in table.texts)
    return "\n".join(
        f"| {' | '.join(row)} |" for row in (table.columns, ["---"] * len(table.columns), *rows)
    )


def _make_svg(chart: Element) -> Markup:
    """Serialize a chart; the serializer escapes its text."""
    return Markup(tostring(chart, encoding="unicode", method="html"))  # noqa: S704


HTML = _make_environment(escapes=True)
HTML.filters["svg"] = _make_svg
MARKDOWN = _make_environment(escapes=False)
MARKDOWN.filters["table"] = _make_markdown_table
