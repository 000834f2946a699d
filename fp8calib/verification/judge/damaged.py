"""Which tensors a scale does not fit: they clip, underflow, or stand out from their role."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median_high

from fp8calib.verification.report import LayerResult

LEAST_DB = 15.0
"""Half the SQNR (in dB) that e4m3 gives a tensor whose scale fits."""
CLIPPED = 1e-3
"""Above this share of clipped values a scale is too small, whatever the metrics say."""
MOST_CLIPPED = 0.01
"""Rules may choose to clip a little; above this share no verdict is good."""
_LOST_DB = 6.0
"""A site this far under the median of the others of its kind stands out."""
_FLUSHED = 0.02
"""So many values vanish of a tensor that spans many octaves, however well its scale fits."""
_CACHED = frozenset({"k", "v"})
"""Roles that FP8 itself flushes nothing of; inputs of linears may span more than its range."""


def find_broken(candidate: str, layers: Sequence[LayerResult]) -> list[LayerResult]:
    """List the sites of a candidate whose scale does not fit, the most damaged first."""
    rows = [row for row in layers if row.candidate == candidate and row.sqnr_db is not None]
    return [
        row
        for row in rows
        if row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, _usual_db(row, rows))
    ]


def find_damaged(candidate: str, layers: Sequence[LayerResult]) -> LayerResult | None:
    """Give the first site of a candidate that no good verdict can stand beside."""
    rows = [row for row in layers if row.candidate == candidate]
    ruined = (
        row
        for row in rows
        if row.clipped > MOST_CLIPPED
        or _is_lost(row)
        or (
            row.role in _CACHED
            and row.flushed > _FLUSHED
            and _stands_out(row, _usual_db(row, rows))
        )
    )
    return next(ruined, None)


def _usual_db(row: LayerResult, rows: Sequence[LayerResult]) -> float:
    """Give the median SQNR of the others of its kind: one broken scale of four must not count.

    K and V are one kind: a scale that fits leaves both the same, and a model may have one layer.
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
    is_hurt = row.role == "weight" or row.clipped > 0 or row.flushed > _FLUSHED
    return row.sqnr_db >= LEAST_DB and is_hurt
