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
