"""Results show one screen of themselves, in a Python session and in a notebook."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from fp8calib.commands.result import Overview


def test_a_table_is_aligned_between_title_and_notes() -> None:
    shown = Overview("T", ("role", "n"), [["k", "12"], ["input", "3"]], ["so it is"]).to_text()
    assert shown == "T\n  role   n\n  k      12\n  input  3\nso it is"


@pytest.mark.parametrize("num_rows", [0, 1, 9, 10, 1000])
@pytest.mark.parametrize("num_notes", [0, 6, 7, 1000])
def test_nothing_is_longer_than_a_screen(num_rows: int, num_notes: int) -> None:
    rows = [["x" * 500, "é" * 500] for _ in range(num_rows)]
    shown = Overview("t" * 500, ("a", "b"), rows, ["word " * 500] * num_notes).to_text()
    lines = shown.splitlines()
    assert len(lines) <= 25
    assert max(map(len, lines)) <= 110
    assert (f"and {num_rows - 9} more" in shown) == (num_rows > 9)
    assert (f"and {num_notes - 6} more" in shown) == (num_notes > 6)


def test_a_terminal_and_a_page_get_no_commands_from_names() -> None:
    overview = Overview("<b>\x1b[31m", ("<i>",), [["<script>\n"]], ["a & b"])
    assert overview.to_text() == "<b>\\x1b[31m\n  <i>\n  <script>\\n\na & b".replace("\n\n", "\n")
    page = ElementTree.fromstring(f"<div>{overview.to_html()}</div>")  # noqa: S314 -- ours
    assert [cell.text for cell in page.iter("td")] == ["<script>\\n"]
    assert [each.text for each in page.iter("p")] == [None, "a & b"]
