"""HTML from element trees: all text goes through the serializer, which escapes it."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, tostring

Child = Element | str


def element(tag: str, *children: Child, **attributes: str) -> Element:
    """Make an element; `class_` means class, other underscores in names mean hyphens."""
    made = Element(tag, {_attribute_name(name): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            made.append(child)
        elif len(made):
            made[-1].tail = (made[-1].tail or "") + child
        else:
            made.text = (made.text or "") + child
    return made


def make_table(
    header: Sequence[str], rows: Sequence[Sequence[Child]], *, label: str, words: int
) -> Element:
    """Make a table that scrolls inside its own box.

    `label` describes it for screen readers; all columns after the first `words` hold numbers.
    """
    kinds = ["words"] * words + ["number"] * (len(header) - words)
    body = element("tbody", *(_make_row("td", row, kinds) for row in rows))
    table = element("table", element("thead", _make_row("th", header, kinds)), body)
    return element("div", table, class_="scroll", role="region", aria_label=label, tabindex="0")


def _make_row(tag: str, cells: Sequence[Child], kinds: Sequence[str]) -> Element:
    pairs = zip(cells, kinds, strict=True)
    return element("tr", *(element(tag, cell, class_=kind) for cell, kind in pairs))


def write_html(root: Element) -> str:
    """Serialize a whole page."""
    return "<!DOCTYPE html>\n" + tostring(root, encoding="unicode", method="html") + "\n"


def measure(part: Element) -> int:
    """Give the size of an element on the page, in bytes."""
    return len(tostring(part, encoding="utf-8", method="html"))


def _attribute_name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
