"""Weights whose scales cover zeros alone."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AllZeroWeight:
    """A weight that is all zeros, whole or in some rows or blocks."""

    tensor: str
    count: int
    """How many of its scales cover only zeros."""
    total: int
