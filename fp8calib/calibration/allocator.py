"""Return freed memory to the system, or keep it for the next allocation."""

from __future__ import annotations

import ctypes
from contextlib import suppress

import torch

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""`M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of glibc's `malloc.h`."""
_KEPT_BYTES = 2**27
_MAPPED_BYTES = 2**24
"""Larger allocations have pages of their own, which are returned when they are freed."""


def return_freed_memory() -> None:
    """Return memory that is freed but still held by glibc; without glibc do nothing.

    Small results settle in the gaps that large tensors leave. The next large tensors then need new
    pages, and the process grows beyond what it uses at any one time. Takes some milliseconds.
    """
    with suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def free_bytes(device: torch.device) -> int:
    """Count the bytes of a GPU that are free, or held by torch and unused."""
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + unused


def keep_freed_memory() -> None:
    """Let glibc keep freed memory until `return_freed_memory`; without glibc do nothing.

    By default glibc returns tensors of some megabytes one by one as they are freed, and the next
    ones get new pages from the system: in a streamed run this doubled the page faults. After it
    has freed one larger block, such as logits, it puts such blocks among small ones, where they
    leave holes: 30 MB for each batch that `verify` scored. The setting holds for the whole process.
    """
    with suppress(OSError, TypeError, AttributeError):
        library = ctypes.CDLL(None)
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _MAPPED_BYTES)
