"""Giving freed memory back to the system."""

from __future__ import annotations

import ctypes


def return_freed_memory() -> None:
    """Give back what is freed but still held, where the C library is glibc; elsewhere do nothing.

    Small results that stay settle in the room that large tensors left, so that the next large ones
    need new room, and the process grows by what it never uses at once. Takes some milliseconds.
    """
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, TypeError, AttributeError):
        return
