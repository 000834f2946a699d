"""Find the tensors that a scale does not fit, and tell whether the KV cache needs scales."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median_high
from typing import Literal

from fp8calib.model.shapes import Site
from fp8calib.numerics.histogram_estimates import MOST_CLIPPED
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.report import (
    SCALE_ONE,
    KvNeed,
    LayerResult,
    PairedAnswer,
    PairedResult,
    SiteFit,
)

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
_MEAN_LOSS_DB = 0.4
"""Many small losses count too: this is a tenth more noise in the mean over all sites."""


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
    rows, unjudged = _list_rows(candidate, layers, fits)
    return [
        row
        for row in unjudged
        if row.sqnr_db is not None
        and (row.clipped > CLIPPED or _is_lost(row) or _stands_out(row, rows))
    ]


def describe_damage(candidate: str, layers: Sequence[LayerResult], fits: Fits) -> str:
    """Describe the first site of a candidate that is destroyed; empty without one."""
    damaged = filter(is_damaged, fits.get(candidate, ()))
    if fit := max(damaged, key=lambda each: each.loss_db, default=None):
        found: SiteFit | LayerResult = fit
        sqnr_db = fit.worst_db
    else:
        rows, unjudged = _list_rows(candidate, layers, fits)
        destroyed = (
            row
            for row in unjudged
            if row.clipped > MOST_CLIPPED
            or _is_lost(row)
            or (row.role in KV_AND_Q and row.flushed > FLUSHED and _stands_out(row, rows))
        )
        if (row := next(destroyed, None)) is None:
            return ""
        found, sqnr_db = row, row.sqnr_db
    sqnr = "" if sqnr_db is None else f"an SQNR of {sqnr_db:.1f} dB, "
    lost = f"{found.clipped:.1%} clipped, {found.flushed:.1%} zeroed"
    return f"{found.site} (layer {found.layer}) is destroyed: {sqnr}{lost}"


def _list_rows(
    candidate: str, layers: Sequence[LayerResult], fits: Fits
) -> tuple[list[LayerResult], list[LayerResult]]:
    """List the rows of a candidate, and those of them that no fit judges."""
    judged = {fit.site for fit in fits.get(candidate, ())}
    rows = [row for row in layers if row.candidate == candidate]
    return rows, [row for row in rows if row.site not in judged]


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
    others = [
        other.sqnr_db
        for other in rows
        if other is not row and other.role in kind and other.sqnr_db is not None
    ]
    usual_db = median_high(others) if others else 0.0
    if row.sqnr_db is None or row.sqnr_db >= usual_db - _LOST_DB:
        return False
    is_hurt = row.role == "weight" or row.clipped > 0 or row.flushed > FLUSHED
    return row.sqnr_db >= LEAST_DB and is_hurt


# --- the need of scales --------------------------------------------------------------------------

FITTED = "scales that fit"
"""Names the divergences of a KV cache whose scales fit every tensor."""


def list_losing(fits: Sequence[SiteFit]) -> list[SiteFit]:
    """List the sites that lose more than rounding alone varies, the largest loss first."""
    losing = [fit for fit in fits if loses(fit)]
    if not losing and fits and sum(fit.loss_db for fit in fits) / len(fits) >= _MEAN_LOSS_DB:
        losing = [fit for fit in fits if fit.loss_db >= _MEAN_LOSS_DB]
    return sorted(losing, key=lambda fit: -fit.loss_db)


def find_fitting(candidates: Sequence[Candidate], fits: Fits) -> str:
    """Name the first candidate with KV scales that all fit; empty without one."""
    cached = (each.name for each in candidates if not each.weights and each.name != SCALE_ONE)
    return next((name for name in cached if name in fits and not list_losing(fits[name])), "")


def find_unknown_cost(candidates: Sequence[Candidate], fits: Fits) -> Mapping[Site, Quantizer]:
    """Give quantizers with scales that fit, if only they tell what scale 1.0 adds to FP8's cost.

    Where scale 1.0 loses nothing, it adds nothing; where the scales of a candidate fit, that
    candidate tells.
    """
    others = [each for each in candidates if each.name != SCALE_ONE]
    is_asked = not others or any(not each.weights for each in others)
    if not is_asked or not list_losing(fits.get(SCALE_ONE, ())) or find_fitting(others, fits):
        return {}
    return next(each.fitted for each in candidates if each.name == SCALE_ONE)


def assess_need(
    losing: Sequence[SiteFit],
    fp8: tuple[float, float | None],
    added: PairedResult | None,
    removed: Sequence[PairedResult],
) -> KvNeed:
    """Answer whether scales are needed.

    Where no site loses at scale 1.0, they are not, whatever the divergences are. Where a site is
    destroyed that a fitted scale keeps, they are. Else the paired divergence decides.

    Args:
        losing: the sites that lose at scale 1.0, the largest loss first.
        fp8: what FP8 costs with scales that fit: the mean divergence, and its standard error.
        added: scale 1.0 against such scales; None where they were not run.
        removed: candidates with KV scales against scale 1.0.
    """
    told = PairedAnswer.CANNOT_TELL if added is None else added.answer
    answer: Literal["yes", "no", "cannot-tell"] = "no"
    if any(map(is_damaged, losing)) or (losing and told is PairedAnswer.WORSE):
        answer = "yes"
    elif losing and told is PairedAnswer.CANNOT_TELL:
        answer = "cannot-tell"
    return KvNeed(
        answer=answer,
        sites=tuple(fit.site for fit in losing),
        layers=tuple(sorted({fit.layer for fit in losing})),
        fp8_kld=fp8[0],
        fp8_kld_se=fp8[1],
        added_by_one=added,
        removed=tuple(removed),
    )
