"""Ctrl-C and SIGTERM, which are one thing here: the work ends, and says how to go on."""

from __future__ import annotations

import signal
from types import FrameType

_asked: list[int] = []
"""The signals that came."""


def listen() -> None:
    """Raise KeyboardInterrupt at SIGINT, unless the caller had it ignored, and at SIGTERM."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt)
    signal.signal(signal.SIGTERM, _interrupt)


def raise_again() -> None:
    """Raise what Python swallows where a signal meets a destructor or a callback of C code."""
    if _asked:
        raise KeyboardInterrupt


def _interrupt(number: int, _frame: FrameType | None) -> None:
    _asked.append(number)
    raise KeyboardInterrupt
