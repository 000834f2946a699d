"""Giving freed memory back to the system, and keeping it for what is needed next."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's `malloc.h`."""
_KEPT_BYTES = 2**27
_MAPPED_BYTES = 2**24
"""What is larger has pages of its own, which go back to the system with it."""


def return_freed_memory() -> None:
    """Give back what is freed but still held, where the C library is glibc; elsewhere do nothing.

    Small results that stay settle in the room that large tensors left, so that the next large ones
    need new room, and the process grows by what it never uses at once. Takes some milliseconds.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def return_memory_of(device: torch.device) -> None:
    """Give back what a batch that did not fit had taken, once nothing holds its error any more."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        return_freed_memory()


def keep_freed_memory() -> None:
    """Keep what is freed until `return_freed_memory`, where the C library is glibc.

    By itself glibc returns tensors of some megabytes one by one as they are freed, and the next
    ones get their pages from the system again, which was seen to double the page faults of a
    streamed run. Holds for the whole process from now on.
    """
    with suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
