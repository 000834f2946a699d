"""The report's rows on layers and sites, from sums of damage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.model.shapes import KV_ROLES, Site
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.histogram_estimates import clipped_share
from fp8calib.verification.emulation.damage import Damage, join_heads
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.report import DiagnosisResult, LayerResult, SiteFit


def list_layers(
    candidate: str,
    damage: Mapping[Site, torch.Tensor],
    scales: Mapping[Site, ScaleRange],
    layer_of: Mapping[str, int],
) -> list[LayerResult]:
    """Make the rows of one candidate, the most damaged site first."""
    rows = []
    for site, sums in damage.items():
        found, scale = Damage(*sums.tolist()), scales[site]
        rows.append(
            LayerResult(
                candidate=candidate,
                site=str(site),
                layer=layer_of[site.module],
                role=site.role.value,
                sqnr_db=found.sqnr_db,
                clipped=found.clipped_share,
                flushed=found.flushed_share,
                amax=found.amax,
                scale=scale.largest,
                largest=scale.largest_value,
                smallest_scale=None if scale.smallest == scale.largest else scale.smallest,
                scale_per=scale.per,
            )
        )
    return sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0, row.site))


PER_HEAD = "\0per-head"
"""A kind of scales that is measured beside those of the candidates."""


def measure_fits(
    found: Mapping[tuple[str, Site], torch.Tensor], kind: str, layer_of: Mapping[str, int]
) -> tuple[SiteFit, ...]:
    """Compare a kind of scales with the fitted ones at every site, in the order of the sites."""
    fits = []
    for (name, site), (heads, fitted) in found.items():
        if name != kind:
            continue
        pairs = [
            (Damage(*one), Damage(*other))
            for one, other in zip(heads.tolist(), fitted.tolist(), strict=True)
        ]
        mine, best = max(pairs, key=lambda pair: _loss_db(*pair))
        fits.append(
            SiteFit(
                site=str(site),
                layer=layer_of[site.module],
                role=site.role.value,
                damage=join_heads(heads),
                fitted=join_heads(fitted),
                loss_db=_loss_db(mine, best),
                worst_db=mine.sqnr_db,
                clipped=max(mine.clipped_share - best.clipped_share, 0.0),
                flushed=max(mine.flushed_share - best.flushed_share, 0.0),
            )
        )
    return tuple(fits)


_MOST_DB = 200.0
"""Stands for a loss where the fitted scale loses nothing at all."""


def _loss_db(mine: Damage, best: Damage) -> float:
    if mine.noise <= best.noise:
        return 0.0
    return min(10 * math.log10(mine.noise / best.noise), _MOST_DB) if best.noise else _MOST_DB


def diagnose(
    found: Mapping[tuple[str, Site], torch.Tensor],
    fits: Iterable[SiteFit],
    scaled: str,
    stats: CalibrationStats | None,
    fmt: Fp8Format,
) -> Iterator[DiagnosisResult]:
    """Compare scale 1.0, whose `fits` are given, with the candidate `scaled` and per-head scales.

    From statistics follows the share of calibration's values that clips at scale 1.0.
    """
    sqnr_db = {key: join_heads(mine).sqnr_db for key, (mine, _) in found.items()}
    for fit in fits:
        site = Site.parse(fit.site)
        seen = None if stats is None or site.role not in KV_ROLES else stats.sites.get(site)
        clipped = None
        if seen is not None and seen.histogram is not None:
            clipped = clipped_share(seen.histogram, 1.0, fmt, amax=float(seen.amax.max()))
        yield DiagnosisResult(
            site=fit.site,
            layer=fit.layer,
            fitted_db=fit.fitted.sqnr_db,
            unscaled_db=fit.damage.sqnr_db,
            unscaled_loss_db=fit.loss_db,
            unscaled_clipped=fit.damage.clipped_share,
            unscaled_flushed=fit.damage.flushed_share,
            scaled_db=sqnr_db.get((scaled, site)),
            per_head_db=sqnr_db.get((PER_HEAD, site)),
            calibration_clipped=clipped,
        )
