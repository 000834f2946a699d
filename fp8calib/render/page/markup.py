"""Charts from element trees: all text goes through the serializer, which escapes it."""

from __future__ import annotations

from xml.etree.ElementTree import Element, tostring

from markupsafe import Markup

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


def to_markup(part: Element) -> Markup:
    """Serialize an element; the serializer has escaped its text."""
    return Markup(tostring(part, encoding="unicode", method="html"))  # noqa: S704


def measure(part: Element) -> int:
    """Give the size of an element on the page, in bytes."""
    return len(tostring(part, encoding="utf-8", method="html"))


def _attribute_name(name: str) -> str:
    return name.rstrip("_").replace("_", "-")
