"""Which tables `fp8calib show` prints."""

from __future__ import annotations

from enum import Enum


class Tables(Enum):
    """The option of the command line that chooses them."""

    NONE = ""
    """Only what stands out is printed."""
    KV = "--kv"
    ALL = "--all"
