"""The report's rows on layers and sites, from sums of damage."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fp8calib.model.shapes import Site
from fp8calib.verification.emulation.damage import Damage, join_heads
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.report import LayerResult, SiteFit


def list_layers(
    candidate: str,
    damage: Mapping[Site, torch.Tensor],
    scales: Mapping[Site, ScaleRange],
    fits: Mapping[tuple[str, Site], torch.Tensor],
    layer_of: Mapping[str, int],
) -> list[LayerResult]:
    """Make the rows of one candidate, the most damaged site first.

    `fits` are those of `MeasurementHooks.found`.
    """
    rows = []
    for site, sums in damage.items():
        found, scale = Damage(*sums.tolist()), scales[site]
        measured = fits.get((candidate, site))
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
                fit=None if measured is None else measure_fit(measured),
            )
        )
    return sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0, row.site))


def measure_fit(measured: torch.Tensor) -> SiteFit:
    """Compare a scale with the fitted one: the sums of `measure_heads` with both, [2, H, 6]."""
    pairs = [(Damage(*one), Damage(*other)) for one, other in zip(*measured.tolist(), strict=True)]
    mine, best = max(pairs, key=lambda pair: _loss_db(*pair))
    return SiteFit(
        damage=join_heads(measured[0]),
        loss_db=_loss_db(mine, best),
        worst_db=mine.sqnr_db,
        clipped=max(mine.clipped_share - best.clipped_share, 0.0),
        flushed=max(mine.flushed_share - best.flushed_share, 0.0),
    )


_MOST_DB = 200.0
"""Stands for a loss where the fitted scale loses nothing at all."""


def _loss_db(mine: Damage, best: Damage) -> float:
    if mine.noise <= best.noise:
        return 0.0
    return min(10 * math.log10(mine.noise / best.noise), _MOST_DB) if best.noise else _MOST_DB
