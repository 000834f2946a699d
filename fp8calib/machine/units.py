"""Memory sizes as text."""

from __future__ import annotations

import math

from fp8calib.errors import UsageError

_MIB = 2**20
GIB = 2**30


def format_gib(size_bytes: int, decimals: int = 2) -> str:
    """Format a size of memory: `12 MiB` below a tenth of a GiB, otherwise `1.25 GiB`."""
    if size_bytes < GIB // 10:
        return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
    return f"{size_bytes / GIB:.{decimals}f} GiB"


def count_decimals(one_bytes: int, other_bytes: int) -> int:
    """Count the decimals, 2 at least, with which two sizes are different numbers of GiB."""
    return next(
        (n for n in range(2, 10) if f"{one_bytes / GIB:.{n}f}" != f"{other_bytes / GIB:.{n}f}"), 2
    )


def check_gib(memory: float) -> None:
    """Refuse a --memory that is no size.

    Raises:
        UsageError: it is not a number above 0.
    """
    if not 0 < memory * GIB < math.inf:
        raise UsageError(f"--memory {memory}: must be a number of GiB above 0")
