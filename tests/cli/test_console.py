"""What is printed while a command runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fp8calib.cli import console
from fp8calib.cli.console import print_table, print_text, say, warn
from fp8calib.machine import memory


def test_a_pipe_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    sizes = iter([3 * 2**29])
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: next(sizes, 2**29))
    with console.Bar() as bar:
        bar.stage("calibrating", 100_000, unit="tokens")
        for _ in range(100):
            now += 1.5
            bar.advance(600)
        bar.stage("quantizing", None, unit="bytes")
        now += 60
        bar.advance(120)
    assert capsys.readouterr().err.splitlines() == [
        "calibrating: 24,000 of 100,000 tokens, 24%, 0:03:10 left, 400 tokens/s, peak 1.50 GiB",
        "calibrating: 48,000 of 100,000 tokens, 48%, 0:02:10 left, 400 tokens/s, peak 1.50 GiB",
        "quantizing: 120 bytes, 2 bytes/s, peak 1.50 GiB",
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


def test_a_pipe_is_told_which_layer_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: None)
    with console.Bar() as bar:
        bar.stage("layer by layer", 80 * 3000, unit="tokens", layers=80)
        now += 60
        bar.advance(12 * 3000 + 1000)
    assert capsys.readouterr().err.splitlines() == [
        "layer 13 of 80: 1,000 of 3,000 tokens, 15%, 0:05:29 left, 8 tokens/s"
    ]


def test_the_bar_shows_as_much_of_the_line_as_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    bar = console.Bar()
    bar._memory.peak_bytes = 3 * 2**29
    bar.stage("calibrating", 100_000, unit="tokens")
    bar.advance(50_000)
    assert bar._stage is not None
    line = "calibrating: 50,000 of 100,000 tokens, 50%, 0:01:40 left, 500 tokens/s, peak 1.50 GiB"
    assert bar._stage.describe(now + 100) == line
    assert bar._stage.describe(now + 100, len(line)) == line
    assert bar._stage.describe(now + 100, len(line) - 1) == line.rpartition(", ")[0]
    assert bar._stage.describe(now + 100, 20) == "calibrating: 50,000 "
