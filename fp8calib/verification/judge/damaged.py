"""Find the tensors that a scale does not fit: they clip, underflow, or stand out."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from fp8calib.verification.report import LayerResult

LEAST_DB = 15.0
"""Half of the SQNR, in dB, that e4m3 has with a scale that fits."""
CLIPPED = 1e-3
"""With a larger share of clipped values a scale is too small, whatever the metrics are."""
MOST_CLIPPED = 0.01
"""A rule may clip a few values on purpose; above this share no verdict is good."""
_LOST_DB = 6.0
"""A site this far below the median of the other sites of its kind stands out."""
FLUSHED = 0.02
"""A tensor that spans many octaves loses this share of values however well its scale fits."""
_CACHED = frozenset({"k", "v"})
"""Roles that fit into the range of FP8; inputs of linears may span more."""


def list_unfit_scales(candidate: str, layers: Sequence[LayerResult]) -> list[LayerResult]:
    """List the sites of a candidate whose scale does not fit, the most damaged first."""
    rows = [row for row in layers if row.candidate == candidate and row.sqnr_db is not None]
    return [
        row
        for row in rows
        if row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, _usual_db(row, rows))
    ]


def find_damaged(candidate: str, layers: Sequence[LayerResult]) -> LayerResult | None:
    """Find the first site of a candidate whose damage rules out a good verdict."""
    rows = [row for row in layers if row.candidate == candidate]
    damaged = (
        row
        for row in rows
        if row.clipped > MOST_CLIPPED
        or _is_lost(row)
        or (
            row.role in _CACHED and row.flushed > FLUSHED and _stands_out(row, _usual_db(row, rows))
        )
    )
    return next(damaged, None)


def _usual_db(row: LayerResult, rows: Sequence[LayerResult]) -> float:
    """Give the median SQNR of the other sites of its kind, which one bad scale does not move.

    K and V are one kind: with scales that fit, both have the same SQNR, and a model may have
    only one layer.
    """
    others = [
        other.sqnr_db
        for other in rows
        if other is not row and _kind(other) == _kind(row) and other.sqnr_db is not None
    ]
    return median_high(others) if others else 0.0


def _kind(row: LayerResult) -> str:
    return "cached" if row.role in _CACHED else row.role


def _is_lost(row: LayerResult) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= LEAST_DB:
        return False
    return row.role == "weight" or row.clipped > 0 or row.flushed > 0


def _stands_out(row: LayerResult, usual_db: float) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= usual_db - _LOST_DB:
        return False
    is_hurt = row.role == "weight" or row.clipped > 0 or row.flushed > FLUSHED
    return row.sqnr_db >= LEAST_DB and is_hurt
