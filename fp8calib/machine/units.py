"""Memory sizes as text."""

from __future__ import annotations

_MIB = 2**20
GIB = 2**30


def format_gib(size_bytes: int) -> str:
    """Format a size of memory: `12 MiB` below a tenth of a GiB, otherwise `1.25 GiB`."""
    if size_bytes < GIB // 10:
        return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
    return f"{size_bytes / GIB:.2f} GiB"
