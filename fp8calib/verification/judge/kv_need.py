"""Whether the KV cache needs scales: the sites and the paired divergences decide together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fp8calib.verification.judge.damaged import is_damaged, loses
from fp8calib.verification.report import (
    SCALE_ONE,
    KvNeed,
    PairedAnswer,
    PairedResult,
    SiteFit,
)

_MEAN_LOSS_DB = 0.4
"""Many small losses count too: this is a tenth more noise in the mean over all sites."""


def list_losing(fits: Sequence[SiteFit]) -> list[SiteFit]:
    """List the sites that lose more than rounding alone varies, the largest loss first."""
    losing = [fit for fit in fits if loses(fit)]
    if not losing and fits and sum(fit.loss_db for fit in fits) / len(fits) >= _MEAN_LOSS_DB:
        losing = [fit for fit in fits if fit.loss_db >= _MEAN_LOSS_DB]
    return sorted(losing, key=lambda fit: -fit.loss_db)


def find_fitting(candidates: Sequence[str], fits: Mapping[str, Sequence[SiteFit]]) -> str | None:
    """Find a candidate whose scales fit every site: it shows what scales can remove."""
    return next((name for name in candidates if name in fits and not list_losing(fits[name])), None)


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
        removed: candidates against each other.
    """
    answer = {
        None: "cannot-tell",
        PairedAnswer.WORSE: "yes",
        PairedAnswer.CANNOT_TELL: "cannot-tell",
        PairedAnswer.NO_DIFFERENCE: "no",
        PairedAnswer.BETTER: "no",
    }[None if added is None else added.answer]
    if not losing:
        answer = "no"
    elif any(map(is_damaged, losing)):
        answer = "yes"
    return KvNeed(
        answer=answer,
        sites=tuple(fit.site for fit in losing),
        layers=tuple(sorted({fit.layer for fit in losing})),
        fp8_kld=fp8[0],
        fp8_kld_se=fp8[1],
        added_by_one=added,
        removed=tuple(each for each in removed if each.base == SCALE_ONE),
    )
