"""Find the tensors that a scale does not fit, and tell whether the KV cache needs scales."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median_high
from typing import Literal

from fp8calib.numerics.formats import MOST_CLIPPED
from fp8calib.verification.report import LEAST_DB, KvNeed, LayerResult, PairedResult

CLIPPED = 1e-3
"""If a larger share of the values is clipped, the scale is too small, whatever the SQNR."""
MOST_FLUSHED = 0.01
"""A scale that zeroes so many more values than a fitted one does not fit, if it also loses
`_DOUBLED_DB`."""
LEAST_LOSS_DB = 1.0
"""A scale that loses this against a fitted power of two adds a quarter to the noise."""
_DOUBLED_DB = 3.0
"""Twice the noise: the values that became zero carried information."""
_LOST_DB = 6.0
"""A site this far below the median of the other sites of its kind stands out."""
FLUSHED = 0.02
"""A tensor that spans many octaves loses this share of values however well its scale fits."""
_MEAN_LOSS_DB = 0.4
"""Many small losses count too: this is a tenth more noise in the mean over all sites."""


def is_damaged(row: LayerResult) -> bool:
    """Whether the scale destroys a tensor, or a head of it, that a fitted scale would keep."""
    if row.loss_db is None:
        return False
    if row.lost_clipped > MOST_CLIPPED:
        return True
    is_lost = row.worst_db is not None and row.worst_db < LEAST_DB
    return (is_lost and row.loss_db >= LEAST_LOSS_DB) or (
        row.lost_flushed > MOST_FLUSHED and row.loss_db >= _DOUBLED_DB
    )


def list_unfit(rows: Sequence[LayerResult]) -> list[LayerResult]:
    """List the sites of a candidate whose scale does not fit.

    First K, V and q that were measured beside a fitted scale, the largest loss first. Then, in the
    order of `rows`: inputs of linears, weights, and K, V and q that were not measured.
    """
    unfit = (
        row
        for row in rows
        if row.loss_db is None and row.sqnr_db is not None
        if row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, rows)
    )
    return [*list_losing(rows), *unfit]


def describe_damage(rows: Sequence[LayerResult]) -> str:
    """Describe the most damaged site of a candidate; empty if none is destroyed."""
    unmeasured = (
        row
        for row in rows
        if row.loss_db is None
        if row.clipped > MOST_CLIPPED
        or _is_lost(row)
        or (row.role in {"k", "v", "q"} and row.flushed > FLUSHED and _stands_out(row, rows))
    )
    damaged = max(filter(is_damaged, rows), key=lambda row: row.loss_db or 0.0, default=None)
    found = damaged or next(unmeasured, None)
    if found is None:
        return ""
    sqnr_db, clipped, flushed = found.sqnr_db, found.clipped, found.flushed
    if damaged is not None:
        sqnr_db, clipped, flushed = found.worst_db, found.lost_clipped, found.lost_flushed
    sqnr = "" if sqnr_db is None else f"an SQNR of {sqnr_db:.1f} dB, "
    lost = f"{clipped:.1%} clipped, {flushed:.1%} zeroed"
    return f"{found.site} (layer {found.layer}) is destroyed: {sqnr}{lost}"


def _is_lost(row: LayerResult) -> bool:
    if row.sqnr_db is None or row.sqnr_db >= LEAST_DB:
        return False
    return row.role == "weight" or row.clipped > 0 or row.flushed > 0


def _stands_out(row: LayerResult, rows: Sequence[LayerResult]) -> bool:
    """Tell whether a site is far below the median of the others, which one bad scale does not move.

    K and V are one kind: with scales that fit, both have the same SQNR, and a model may have
    only one layer.
    """
    kind = {"k", "v"} if row.role in {"k", "v"} else {row.role}
    alike = (other for other in rows if other is not row and other.role in kind)
    others = [other.sqnr_db for other in alike if other.sqnr_db is not None]
    if row.sqnr_db is None or not others or row.sqnr_db >= median_high(others) - _LOST_DB:
        return False
    is_hurt = row.role == "weight" or row.clipped > 0 or row.flushed > FLUSHED
    return row.sqnr_db >= LEAST_DB and is_hurt


def list_losing(rows: Sequence[LayerResult]) -> list[LayerResult]:
    """List the sites of K, V and q whose scale loses too much, the largest loss first."""
    losses = [(row.loss_db, row) for row in rows if row.loss_db is not None]
    losing = [
        (loss, row) for loss, row in losses if loss >= LEAST_LOSS_DB or row.lost_clipped > CLIPPED
    ]
    if not losing and losses and fmean(loss for loss, _ in losses) >= _MEAN_LOSS_DB:
        losing = [(loss, row) for loss, row in losses if loss >= _MEAN_LOSS_DB]
    losing.sort(key=lambda pair: (-pair[0], pair[1].layer, "kvq".index(pair[1].role)))
    return [row for _, row in losing]


def assess_need(
    losing: Sequence[LayerResult],
    fp8: tuple[float, float | None],
    added: PairedResult | None,
    removed: Sequence[PairedResult],
) -> KvNeed:
    """Answer whether scales are needed, by the fields of `KvNeed`; `losing` lose at scale 1.0.

    If no site loses at scale 1.0, they are not, whatever the divergences are. If scale 1.0 destroys
    a site that a fitted scale keeps, they are. Otherwise the paired divergence decides.
    """
    told = "cannot-tell" if added is None else added.answer
    answer: Literal["yes", "no", "cannot-tell"] = "no"
    if any(map(is_damaged, losing)) or (losing and told == "worse"):
        answer = "yes"
    elif losing and told == "cannot-tell":
        answer = "cannot-tell"
    return KvNeed(
        answer=answer,
        sites=tuple(row.site for row in losing),
        layers=tuple(sorted({row.layer for row in losing})),
        fp8_kld=fp8[0],
        fp8_kld_se=fp8[1],
        added_by_one=added,
        removed=tuple(removed),
    )
