"""What is printed while a command runs."""

import signal
from collections.abc import Callable
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

import fp8calib.machine as memory
from fp8calib.cli import console
from fp8calib.cli.console import print_table, print_text, say, warn


def test_a_pipe_gets_a_line_a_minute(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    sizes = iter([3 * 2**29])
    monkeypatch.setattr(memory, "anonymous_bytes", lambda: next(sizes, 2**29))
    with console.ConsoleReporter() as bar:
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


@pytest.mark.parametrize("rows", [1, 20])
def test_no_cell_commands_the_terminal(rows: int, capsys: pytest.CaptureFixture[str]) -> None:
    print_table("a\x1b[31m", ["name"], [["b\x1b[1m"]] * rows)
    shown = capsys.readouterr().out
    assert "\x1b[1m" not in shown
    assert "\x1b[31m" not in shown
    assert shown.count(r"b\x1b[1m") == rows


@pytest.mark.parametrize(
    ("stage", "line"),
    [
        (
            {"name": "calibrating", "total": 100_000, "unit": "tokens"},
            "calibrating: 50,000 of 100,000 tokens, 50%, 0:01:40 left, 500 tokens/s, peak 1.50 GiB",
        ),
        (
            {"name": "layer by layer", "total": 126 * 4_194_304, "unit": "tokens", "layers": 126},
            "layer 64 of 126: 0 of 4,194,304 tokens, 50%, 0:01:40 left, 20,972 tokens/s, "
            "peak 1.50 GiB",
        ),
    ],
)
def test_the_bar_of_a_terminal_is_one_line(
    monkeypatch: pytest.MonkeyPatch, stage: dict[str, Any], line: str
) -> None:
    now = 1000.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    bar = console.ConsoleReporter()
    bar._memory.peak_bytes = 3 * 2**29
    bar.stage(**stage)
    bar.advance(stage["total"] // 2)
    now += 100
    for width in (200, 80, 40):
        narrow = Console(width=width, file=StringIO())
        narrow.print(bar._progress.make_tasks_table(bar._progress.tasks))
        (shown,) = narrow.file.getvalue().splitlines()
        said = shown[shown.index(line[:5]) :].rstrip().removesuffix("\u2026")
        assert "\u2501" in shown
        assert line.startswith(said)
        assert len(said) > min(len(line) - 1, width - 18)
        assert (said == line) is (width == 200)


def test_a_signal_that_python_swallowed_interrupts_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with console.ConsoleReporter() as bar:
        bar.stage("calibrate", 2, unit="batches")
        bar.advance(1)
        monkeypatch.setattr(console, "received", [signal.SIGTERM])
        with pytest.raises(KeyboardInterrupt):
            bar.advance(1)
