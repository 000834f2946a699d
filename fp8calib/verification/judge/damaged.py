"""Find the tensors that a scale does not fit: they clip, underflow, or stand out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high

from fp8calib.numerics.histogram_estimates import MOST_CLIPPED
from fp8calib.verification.report import LayerResult, SiteFit

LEAST_DB = 15.0
"""Half of the SQNR, in dB, that e4m3 has with a scale that fits."""
CLIPPED = 1e-3
"""With a larger share of clipped values a scale is too small, whatever the metrics are."""
MOST_FLUSHED = 0.01
"""So it is above this share of zeros that a fitted scale keeps, if they carried information."""
LEAST_LOSS_DB = 1.0
"""A scale that loses this against a fitted power of two adds a quarter to the noise."""
_DOUBLED_DB = 3.0
_LOST_DB = 6.0
"""A site this far below the median of the other sites of its kind stands out."""
FLUSHED = 0.02
"""A tensor that spans many octaves loses this share of values however well its scale fits."""
KV_AND_Q = frozenset({"k", "v", "q"})
Fits = Mapping[str, Sequence[SiteFit]]
"""By candidate: how well its scales fit, against fitted ones on the same tensors."""


def loses(fit: SiteFit) -> bool:
    """Whether a scale loses more than another rounding of the same values would."""
    return fit.loss_db >= LEAST_LOSS_DB or fit.clipped > CLIPPED


def is_damaged(fit: SiteFit) -> bool:
    """Whether a tensor, or one head of it, is destroyed that a fitted scale keeps."""
    if fit.clipped > MOST_CLIPPED:
        return True
    is_lost = fit.worst_db is not None and fit.worst_db < LEAST_DB
    return (is_lost and fit.loss_db >= LEAST_LOSS_DB) or (
        fit.flushed > MOST_FLUSHED and fit.loss_db >= _DOUBLED_DB
    )


def list_unfit_rows(candidate: str, layers: Sequence[LayerResult], fits: Fits) -> list[LayerResult]:
    """List the sites whose scale does not fit and that no fit judges, the most damaged first.

    Those are the inputs of linears and weights; K, V and q too where they were not measured beside
    a fitted scale.
    """
    judged = {fit.site for fit in fits.get(candidate, ())}
    rows = [row for row in layers if row.candidate == candidate and row.sqnr_db is not None]
    return [
        row
        for row in rows
        if row.site not in judged
        and (row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, _usual_db(row, rows)))
    ]


def describe_damage(candidate: str, layers: Sequence[LayerResult], fits: Fits) -> str:
    """Describe the first site of a candidate that is destroyed; empty without one."""
    damaged = sorted(filter(is_damaged, fits.get(candidate, ())), key=lambda fit: -fit.loss_db)
    if damaged:
        fit = damaged[0]
        return _describe(fit.site, fit.layer, fit.worst_db, fit.clipped, fit.flushed)
    judged = {fit.site for fit in fits.get(candidate, ())}
    rows = [row for row in layers if row.candidate == candidate]
    row = next((row for row in rows if row.site not in judged and _is_destroyed(row, rows)), None)
    return _describe(row.site, row.layer, row.sqnr_db, row.clipped, row.flushed) if row else ""


def _describe(site: str, layer: int, sqnr_db: float | None, clipped: float, flushed: float) -> str:
    sqnr = "" if sqnr_db is None else f"an SQNR of {sqnr_db:.1f} dB, "
    lost = f"{clipped:.1%} clipped, {flushed:.1%} flushed to zero"
    return f"{site} (layer {layer}) is destroyed: {sqnr}{lost}"


def _is_destroyed(row: LayerResult, rows: Sequence[LayerResult]) -> bool:
    if row.clipped > MOST_CLIPPED or _is_lost(row):
        return True
    is_cached = row.role in KV_AND_Q and row.flushed > FLUSHED
    return is_cached and _stands_out(row, _usual_db(row, rows))


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
    return "cached" if row.role in {"k", "v"} else row.role


def _is_lost(row: LayerResult) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= LEAST_DB:
        return False
    return row.role == "weight" or row.clipped > 0 or row.flushed > 0


def _stands_out(row: LayerResult, usual_db: float) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= usual_db - _LOST_DB:
        return False
    is_hurt = row.role == "weight" or row.clipped > 0 or row.flushed > FLUSHED
    return row.sqnr_db >= LEAST_DB and is_hurt
