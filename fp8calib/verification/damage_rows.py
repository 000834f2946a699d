"""The report's rows on layers and sites, from sums of damage."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fp8calib.fp8.formats import Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import KV_ROLES, Site
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.histogram_estimates import clipped_share
from fp8calib.verification.emulation.damage import Damage
from fp8calib.verification.emulation.fake_quantize import ScaleRange
from fp8calib.verification.report import DiagnosisResult, LayerResult


def index_layers(geometry: ModelGeometry) -> dict[str, int]:
    """Map the path of every attention module and linear to its layer."""
    attentions = {a.module: layer.index for layer, a in geometry.attentions()}
    return attentions | {linear.module: layer.index for layer, linear in geometry.linears()}


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
                smallest_scale=None if scale.smallest == scale.largest else scale.smallest,
                scale_per=scale.per,
            )
        )
    return sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0, row.site))


UNSCALED, SCALED, PER_HEAD = "unscaled", "scaled", "per-head"
"""The kinds of scales that a diagnosis compares."""


def diagnose(
    found: Mapping[tuple[str, Site], torch.Tensor],
    layer_of: Mapping[str, int],
    calibration_clipped: Mapping[Site, float],
) -> tuple[DiagnosisResult, ...]:
    """Compare the kinds of scales on K and V of every layer."""
    damage = {key: Damage(*sums.tolist()) for key, sums in found.items()}
    sqnr_db = {key: each.sqnr_db for key, each in damage.items()}
    return tuple(
        DiagnosisResult(
            site=str(site),
            layer=layer_of[site.module],
            unscaled_db=sqnr_db[UNSCALED, site],
            unscaled_clipped=damage[UNSCALED, site].clipped_share,
            unscaled_flushed=damage[UNSCALED, site].flushed_share,
            scaled_db=sqnr_db.get((SCALED, site)),
            per_head_db=sqnr_db.get((PER_HEAD, site)),
            calibration_clipped=calibration_clipped.get(site),
        )
        for site in dict.fromkeys(site for _, site in found)
        if site.role in KV_ROLES
    )


def clipped_unscaled(stats: CalibrationStats, fmt: Fp8Format) -> dict[Site, float]:
    """Estimate for K and V the share of calibration values that clips at scale 1.0."""
    return {
        site: clipped_share(seen.histogram, 1.0, fmt, amax=float(seen.amax.max()))
        for site, seen in stats.sites.items()
        if site.role in KV_ROLES and seen.histogram is not None
    }
