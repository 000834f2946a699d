"""The report's rows on layers and sites, from sums of damage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch

from fp8calib.fp8.formats import Fp8Format
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.geometry.sites import Role, Site
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.histogram_estimates import clipped_share
from fp8calib.verification.emulation.fake_quantize import Damage, ScaleRange
from fp8calib.verification.report import DiagnosisResult, LayerResult


def index_layers(geometry: ModelGeometry) -> dict[str, int]:
    """Map the path of every attention module and linear to its layer."""
    attentions = {a.module: layer.index for layer, a in geometry.attentions()}
    return attentions | {linear.module: layer.index for layer, linear in geometry.linears()}


def sqnr_db(sums: torch.Tensor) -> float | None:
    """Give the signal-to-quantization-noise ratio; None without noise or without signal."""
    damage = Damage(*sums)
    signal, noise = float(damage.signal), float(damage.noise)
    if not signal or not noise:
        return None
    return 10 * math.log10(signal / noise)


def list_layers(
    candidate: str,
    damage: Mapping[Site, torch.Tensor],
    scales: Mapping[Site, ScaleRange],
    layer_of: Mapping[str, int],
) -> list[LayerResult]:
    """Make the rows of one candidate, the most damaged site first."""
    rows = [
        LayerResult(
            candidate=candidate,
            site=str(site),
            layer=layer_of[site.module],
            role=site.role.value,
            sqnr_db=sqnr_db(sums),
            clipped=_share(Damage(*sums).clipped, sums),
            flushed=_share(Damage(*sums).flushed, sums),
            amax=float(Damage(*sums).amax),
            scale=scales[site].largest,
            smallest_scale=_smallest(scales[site]),
            scale_per=scales[site].per,
        )
        for site, sums in damage.items()
    ]
    return sorted(rows, key=lambda row: (row.sqnr_db is None, row.sqnr_db or 0.0, row.site))


def _smallest(scales: ScaleRange) -> float | None:
    return None if scales.smallest == scales.largest else scales.smallest


def _share(part: torch.Tensor, sums: torch.Tensor) -> float:
    total = float(Damage(*sums).num_elements)
    return float(part) / total if total else 0.0


UNSCALED, SCALED, PER_HEAD = "unscaled", "scaled", "per-head"
"""The kinds of scales that a diagnosis compares."""


def diagnose(
    found: Mapping[tuple[str, Site], torch.Tensor],
    layer_of: Mapping[str, int],
    calibration_clipped: Mapping[Site, float],
) -> tuple[DiagnosisResult, ...]:
    """Compare the kinds of scales on K and V of every layer."""
    sites: Iterable[Site] = dict.fromkeys(site for _, site in found)
    return tuple(
        DiagnosisResult(
            site=str(site),
            layer=layer_of[site.module],
            unscaled_db=_find_db(found, UNSCALED, site),
            unscaled_clipped=_share(Damage(*found[UNSCALED, site]).clipped, found[UNSCALED, site]),
            unscaled_flushed=_share(Damage(*found[UNSCALED, site]).flushed, found[UNSCALED, site]),
            scaled_db=_find_db(found, SCALED, site),
            per_head_db=_find_db(found, PER_HEAD, site),
            calibration_clipped=calibration_clipped.get(site),
        )
        for site in sites
        if site.role in (Role.K, Role.V)
    )


def _find_db(found: Mapping[tuple[str, Site], torch.Tensor], kind: str, site: Site) -> float | None:
    sums = found.get((kind, site))
    return None if sums is None else sqnr_db(sums)


def clipped_unscaled(stats: CalibrationStats, fmt: Fp8Format) -> dict[Site, float]:
    """Estimate for K and V the share of calibration values that clips at scale 1.0."""
    return {
        site: clipped_share(seen.histogram, 1.0, fmt, amax=float(seen.amax.max()))
        for site, seen in stats.sites.items()
        if site.role in (Role.K, Role.V) and seen.histogram is not None
    }
