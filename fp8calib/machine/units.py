"""Sizes and durations in words."""

from __future__ import annotations

_MIB = 2**20
_GIB = 2**30


def spell_size(size_bytes: int) -> str:
    """Spell a size: `12 MiB` under a tenth of a GiB, else `1.25 GiB`."""
    if size_bytes < _GIB // 10:
        return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else f"{size_bytes} bytes"
    return f"{size_bytes / _GIB:.2f} GiB"


def spell_duration(duration_s: float) -> str:
    """Spell a duration as its length allows: `40 s`, `12 min`, `3 h 20 min`."""
    if duration_s < 100:
        return f"{max(duration_s, 1):.0f} s"
    minutes = round(duration_s / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
