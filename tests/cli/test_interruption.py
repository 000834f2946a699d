"""A signal that Python swallows is raised again by the next step of the work."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

CHILD = """
import os, signal, sys
from fp8calib.cli.console import ConsoleReporter
from fp8calib.cli.signals import handle_signals

class Deaf:
    def __del__(self):
        os.kill(os.getpid(), int(sys.argv[1]))
        for _ in range(1000):
            pass

signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
handle_signals()
with ConsoleReporter() as bar:
    bar.stage("work", 2)
    bar.advance(1)
    Deaf()
    print("continued")
    try:
        bar.advance(1)
    except KeyboardInterrupt:
        print("stopped")
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_a_destructor_is_not_lost(number: signal.Signals) -> None:
    command = [sys.executable, "-c", CHILD, str(int(number))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split("\n")[:2] == ["continued", "stopped"]
    assert "KeyboardInterrupt" in done.stderr  # what Python says of the one it swallowed


def test_an_ignored_sigint_stays_ignored() -> None:
    """As in a job that a shell started in the background."""
    code = (
        "import os, signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from fp8calib.cli.signals import handle_signals; handle_signals()\n"
        "os.kill(os.getpid(), signal.SIGINT); print('alive')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "alive\n"
