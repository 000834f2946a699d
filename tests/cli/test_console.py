"""What is printed while a command runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8calib.cli import console
from fp8calib.cli.console import print_table, print_text, say, warn


def test_a_pipe_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(console, "anonymous_bytes", lambda: 3 * 2**29)
    with console.Bar() as bar:
        bar.stage("calibrating", 100_000, unit="tokens")
        for _ in range(100):
            now += 1.5
            bar.advance(600)
        bar.stage("quantizing", None, unit="bytes")
        now += 60
        bar.advance(120)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 24,000 of 100,000 tokens, 400 tokens/s, 24%, 0:03:10 left, 1.50 GiB in use",
        "calibrating: 48,000 of 100,000 tokens, 400 tokens/s, 48%, 0:02:10 left, 1.50 GiB in use",
        "quantizing: 120 bytes, 2 bytes/s, 1.50 GiB in use",
    ]


@pytest.mark.parametrize("show", [print_text, say, warn])
def test_no_text_commands_the_terminal(
    show: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    show("layer\x1b[2J\x07\u202e, \u00b1 \u2264 \u00a0\nnext\tcell")
    shown = "".join(capsys.readouterr())
    assert r"layer\x1b[2J\x07\u202e, " in shown
    assert "\u00b1 \u2264 \u00a0\nnext" in shown


@pytest.mark.parametrize("rows", [1, 2001])
def test_no_cell_commands_the_terminal(rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a\x1b[31m", ["name"], [["b\x1b[1m"]] * rows)
    shown = capsys.readouterr().out
    assert "\x1b[1m" not in shown
    assert "\x1b[31m" not in shown
    assert shown.count(r"b\x1b[1m") == rows
