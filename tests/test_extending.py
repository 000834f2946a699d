"""The examples of docs/extending.md, executed."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"


def example(heading: str) -> str:
    """Give the Python code of the one example under a heading."""
    section = PAGE.read_text().split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    (code,) = re.findall(r"^```python\n(.*?)^```$", section, re.MULTILINE | re.DOTALL)
    return str(code)


def test_the_page_has_its_four_sections() -> None:
    headings = re.findall(r"^## (.*)$", PAGE.read_text(), re.MULTILINE)
    assert headings == ["A dialect", "An engine", "A scheme", "A statistic"]
