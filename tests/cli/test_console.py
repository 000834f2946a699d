"""What is printed while a command runs."""

from __future__ import annotations

import pytest

from fp8calib.cli import console


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
