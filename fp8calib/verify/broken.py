"""Which tensors a scale does not fit: they clip, underflow, or stand out from their role."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from fp8calib.verify.report import LayerResult

LEAST_DB = 15.0
"""Half the SQNR (in dB) that e4m3 gives a tensor whose scale fits."""
CLIPPED = 1e-3
"""Above this share of clipped values a scale is too small, whatever the metrics say."""
MOST_CLIPPED = 0.01
"""Rules may choose to clip a little; above this share no verdict is good."""
_LOST_DB = 6.0
"""A site this far under the median of its role stands out."""
_FLUSHED = 0.02
"""So many values vanish of a tensor that spans many octaves, however well its scale fits."""
_CACHED = frozenset({"k", "v"})
"""Roles that FP8 itself flushes nothing of; inputs of linears may span more than its range."""


def find_broken(candidate: str, layers: Sequence[LayerResult]) -> list[LayerResult]:
    """List the sites of a candidate whose scale does not fit, the most damaged first."""
    rows = [row for row in layers if row.candidate == candidate and row.sqnr_db is not None]
    usual = _medians(rows)
    return [
        row
        for row in rows
        if row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, usual[row.role])
    ]


def find_ruined(candidate: str, layers: Sequence[LayerResult]) -> LayerResult | None:
    """Give the first site of a candidate that no good verdict can stand beside."""
    rows = [row for row in layers if row.candidate == candidate]
    usual = _medians([row for row in rows if row.sqnr_db is not None])
    ruined = (
        row
        for row in rows
        if row.clipped > MOST_CLIPPED
        or _is_lost(row)
        or (
            row.role in _CACHED
            and row.flushed > _FLUSHED
            and _stands_out(row, usual.get(row.role, 0.0))
        )
    )
    return next(ruined, None)


def _medians(rows: Sequence[LayerResult]) -> dict[str, float]:
    return {
        role: median(row.sqnr_db or 0.0 for row in rows if row.role == role)
        for role in {row.role for row in rows}
    }


def _is_lost(row: LayerResult) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= LEAST_DB:
        return False
    return row.role == "weight" or row.clipped > 0 or row.flushed > 0


def _stands_out(row: LayerResult, usual_db: float) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= usual_db - _LOST_DB:
        return False
    return row.sqnr_db >= LEAST_DB and (row.clipped > 0 or row.flushed > _FLUSHED)
