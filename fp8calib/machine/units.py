"""Memory sizes and durations as text."""

from __future__ import annotations

_MIB = 2**20
GIB = 2**30


def format_gib(size_bytes: int) -> str:
    """Format a size of memory: `12 MiB` below a tenth of a GiB, otherwise `1.25 GiB`."""
    if size_bytes < GIB // 10:
        return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
    return f"{size_bytes / GIB:.2f} GiB"


def format_duration(duration_s: float) -> str:
    """Format a duration in the units that fit its length: `40 s`, `12 min`, `3 h 20 min`."""
    if duration_s < 100:
        return f"{max(duration_s, 1):.0f} s"
    minutes = round(duration_s / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
