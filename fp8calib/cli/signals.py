"""Turn SIGINT and SIGTERM into KeyboardInterrupt, which `program.py` answers."""

from __future__ import annotations

import signal
from types import FrameType

received: list[int] = []
"""The signals so far: Python swallows the exception of one in a destructor or a callback of C."""


def handle_signals() -> None:
    """Raise KeyboardInterrupt at SIGTERM, and at SIGINT unless the caller had it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    received.append(number)
    raise KeyboardInterrupt
