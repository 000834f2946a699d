"""The templates of pages, in which all text is escaped."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup


def _make_svg(chart: Element) -> Markup:
    """Serialize a chart; the serializer escapes its text."""
    return Markup(tostring(chart, encoding="unicode", method="html"))  # noqa: S704


HTML = Environment(
    loader=PackageLoader(__package__, ""),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
    undefined=StrictUndefined,
)
HTML.filters["svg"] = _make_svg
