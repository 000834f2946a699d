"""Statistics as rows: one a layer, one a linear."""

from __future__ import annotations

import torch

from fp8calib.geometry.model_geometry import Layer, Linear
from fp8calib.geometry.sites import Role, Site
from fp8calib.numerics.formats import E4M3FN
from fp8calib.numerics.from_amax import scale_of
from fp8calib.numerics.positions import range_starts
from fp8calib.results.show import (
    HeaderShown,
    LayerRow,
    LinearRow,
    Positions,
    StatsShown,
)
from fp8calib.scales.compute import list_unfit_queries
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.saturation import compute_position_saturation, compute_saturation
from fp8calib.stats.statistic import SiteStats


def show_stats(stats: CalibrationStats) -> StatsShown:
    """Make the rows of statistics."""
    return StatsShown(
        header=HeaderShown(**dict(stats.header)),
        part=stats.shard,
        layers=tuple(_layer_row(stats, layer) for layer in stats.geometry.layers),
        linears=tuple(_linear_row(stats, linear) for _, linear in stats.geometry.linears()),
        experts=stats.expert_counts,
        positions=Positions(
            first=range_starts(),
            amax={
                str(site): found.positions.tolist()
                for site, found in stats.sites.items()
                if found.positions is not None
            },
        ),
        saturation=compute_saturation(stats),
        position_saturation=compute_position_saturation(stats),
        unfit_queries=tuple(list_unfit_queries(stats)),
    )


def _layer_row(stats: CalibrationStats, layer: Layer) -> LayerRow:
    attention = layer.attention
    if attention is None:
        return LayerRow(layer=layer.index, mixer=layer.mixer)
    mixer, owner = layer.mixer, stats.geometry.producer_of(attention)
    if attention.producer is not None:
        mixer = f"{layer.mixer} (K/V of layer {attention.producer})"
    k, v = (_find_amax(stats.sites.get(owner.site(role))) for role in (Role.K, Role.V))
    both = max((amax for amax in (k, v) if amax is not None), default=None)
    is_joint = attention.kind == "latent"  # one cache, one scale
    query = _find_amax(stats.sites.get(attention.site(Role.Q)))
    query = None if query is None else query / attention.query_divisor
    return LayerRow(
        layer=layer.index,
        mixer=mixer,
        k_amax=k,
        k_scale=_compute_scale(both if is_joint else k),
        v_amax=v,
        v_scale=_compute_scale(both if is_joint else v),
        q_amax=query,
        q_scale=_compute_scale(query),
        tokens=_count_tokens(stats.sites.get(owner.site(Role.K))),
    )


def _linear_row(stats: CalibrationStats, linear: Linear) -> LinearRow:
    seen = stats.sites.get(Site(linear.module, Role.INPUT))
    weight = _find_amax(stats.sites.get(Site(linear.module, Role.WEIGHT)))
    amax = _find_amax(seen)
    return LinearRow(
        linear=linear.module,
        input_amax=amax,
        input_scale=_compute_scale(amax),
        weight_amax=weight,
        weight_scale=_compute_scale(weight),
        tokens=_count_tokens(seen),
    )


def _find_amax(seen: SiteStats | None) -> float | None:
    return None if seen is None or not len(seen.amax) else float(seen.amax.max())


def _compute_scale(amax: float | None) -> float | None:
    if amax is None or not amax > 0:
        return None
    return float(scale_of(torch.tensor(amax), E4M3FN))


def _count_tokens(seen: SiteStats | None) -> int | None:
    return None if seen is None else seen.count
