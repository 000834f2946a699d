"""Turn SIGINT and SIGTERM into KeyboardInterrupt, which `program.py` answers."""

from __future__ import annotations

import signal
from types import FrameType

_received: list[int] = []
"""The signals received so far."""


def handle_signals() -> None:
    """Raise KeyboardInterrupt at SIGTERM, and at SIGINT unless the caller had it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def reraise_signal() -> None:
    """Raise KeyboardInterrupt again: Python swallows it in a destructor or a callback of C code."""
    if _received:
        raise KeyboardInterrupt


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _received.append(number)
    raise KeyboardInterrupt
