"""Compute scales from statistics: `scale = amax / fmt.max`, fp32.

A rule (`fp8calib.numerics.rules`) may replace the amax of an activation by another magnitude. Like
every server, and unlike torch's float8 training code, this package multiplies by the scale to
dequantize. Where the amax is zero or no token reached a site, the scale is a listed fallback.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import product
from types import MappingProxyType

import torch

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.statistic import SiteStats
from fp8calib.errors import ExportError
from fp8calib.formats.ranks import max_per_rank
from fp8calib.formats.site_rules import find_site_rules
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable, fill_missing
from fp8calib.model.shapes import Attention, Linear, Part, Role, Site
from fp8calib.model.tensor_parallel import (
    check_heads,
    owned_blocks,
    owned_channels,
    owned_rows,
)
from fp8calib.numerics.clip_range import ClipRange, find_clip_range
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.from_amax import scale_of
from fp8calib.numerics.rules import AMAX, ONE, Fallback, Rule

NO_RULES: Mapping[str, Rule] = MappingProxyType({})
UNSCALED_QUERY_FLOOR = E4M3FN.max / 2**13
"""Below this amax a q quantized with scale 1.0 loses most of its values to subnormals."""


def list_unfit_queries(stats: CalibrationStats) -> dict[int, float]:
    """List the layers whose q clips or underflows with scale 1.0, each with its amax."""
    found: dict[int, float] = {}
    for layer, attention in stats.geometry.attentions():
        seen = stats.sites.get(attention.site(Role.Q))
        if seen is None or not seen.count:
            continue
        amax = float(seen.amax.max()) / attention.query_divisor
        if amax > E4M3FN.max or 0 < amax < UNSCALED_QUERY_FLOOR:
            found[layer.index] = amax
    return found


def compute_kv_scales(
    stats: CalibrationStats,
    fmt: Fp8Format,
    *,
    tp: int = 1,
    per_head: bool = False,
    query: bool = False,
    fallback: Fallback | None = None,
    rule: Rule = AMAX,
    rules: Mapping[str, Rule] = NO_RULES,
) -> ScaleTable:
    """Compute scales of K and V (and of q when asked) for every layer that reads a KV cache.

    With `tp` ranks a per-tensor scale covers the heads of its rank. A per-head scale is independent
    of the rank, so per-head tables have one rank. Latent attention stores latent and rotary part in
    one cache under one scale: both get the larger one, and a rule sees both as one tensor.

    A fallback of None is `layer-max` for tensors of zeros, and refuses sites that no token reached.
    Where `rule` needs a missing histogram (q never has one), the amax is used, and the table lists
    the site in `kept_amax`. `rules` has those of other K and V, by pattern (`find_site_rules`).

    Raises:
        UsageError: `tp` does not fit the heads.
        RecipeError: a pattern of `rules` matches no K or V.
        ExportError: the stats lack a site, or `fallback` is `refuse` and a site needs it.
    """
    check_heads(stats.geometry, tp)
    by_site = find_site_rules(rules, stats.geometry)
    roles = (Role.K, Role.V, Role.Q) if query else (Role.K, Role.V)
    scales: dict[Site, Scale] = {}
    kept_amax: dict[Site, str] = {}
    for _, attention in stats.geometry.attentions():
        producer = stats.geometry.producer_of(attention)
        for role in roles:
            site, owner = attention.site(role), attention if role is Role.Q else producer
            seen = _in_one_cache(stats, owner, role, fallback)
            own = by_site.get(owner.site(role), rule)
            if own == ONE and role is Role.Q:  # no rule makes the scale of q 1.0
                own = AMAX
            clip_range = _clip_range(own, seen.values(), fmt)
            scale = _kv_scale(
                attention, role, seen[role], clip_range, fmt, tp=tp, per_head=per_head
            )
            if owner is not attention:
                scale = Scale(values=scale.values, source=ScaleSource.SHARED)
            elif clip_range.kept_amax:
                kept_amax[site] = clip_range.kept_amax
            scales[site] = scale
        if attention.kind == "latent":
            _share_latent(scales, attention)
    pools = {site: [[scale]] for site, scale in scales.items()}
    return ScaleTable(
        geometry=stats.geometry,
        fmt=fmt,
        tp=tp,
        per_head=per_head,
        scales=fill_missing(scales, pools, fallback),
        kept_amax=kept_amax,
        origin=stats.origin,
    )


def compute_linear_scales(
    stats: CalibrationStats,
    fmt: Fp8Format,
    *,
    tp: int = 1,
    fallback: Fallback | None = None,
    rule: Rule = AMAX,
) -> ScaleTable:
    """Compute per-tensor input and weight scales of every attention and MLP projection.

    Every projection in a fused weight (`q_proj` of a `qkv_proj`) has its own scale, and so does
    every expert. A scale covers the rank's rows of a column-parallel weight, and the rank's
    channels of a row-parallel weight and its input. `rule` applies to inputs;
    weights always use their amax.

    Raises:
        ExportError: the stats lack a site, or `fallback` is `refuse` and a site needs it.
    """
    scales: dict[Site, Scale] = {}
    kept_amax: dict[Site, str] = {}
    pools: dict[Site, list[list[Scale]]] = {}
    layer_pools: dict[tuple[int, Role], list[Scale]] = {}
    rules = {Role.INPUT: rule, Role.WEIGHT: AMAX}
    for layer, linear in stats.geometry.linears():
        if linear.section == "other":
            continue
        for part, role in product(linear.parts, rules):
            site = Site(linear.module, role)
            seen = _find(stats, site, fallback)
            clip_range = _clip_range(rules[role], [seen], fmt)
            if clip_range.kept_amax:
                kept_amax[site] = clip_range.kept_amax
            by_expert = _linear_scales(seen, clip_range, linear, part, role, fmt, tp)
            found = {
                Site(linear.logical(part, expert), role): scale
                for expert, scale in by_expert.items()
            }
            scales |= found
            siblings = list(found.values())
            whole_layer = layer_pools.setdefault((layer.index, role), [])
            whole_layer += siblings
            pools |= {key: [siblings, whole_layer] for key in found}
    return ScaleTable(
        geometry=stats.geometry,
        fmt=fmt,
        tp=tp,
        per_head=False,
        scales=fill_missing(scales, pools, fallback),
        kept_amax=kept_amax,
        origin=stats.origin,
    )


def _find(stats: CalibrationStats, site: Site, fallback: Fallback | None) -> SiteStats:
    if site not in stats.sites:
        reasons = [skipped.why for skipped in stats.header.skipped if skipped.site == str(site)]
        raise ExportError(
            f"the statistics do not contain {site}" + "".join(f": {why}" for why in reasons),
            hint="" if reasons else "calibrate with a recipe that observes it",
        )
    found = stats.sites[site]
    if found.count == 0 and site.role is not Role.WEIGHT and fallback is None:
        raise ExportError(f"no token reached {site}", hint="choose its scale with --fallback")
    return found


def _in_one_cache(
    stats: CalibrationStats, owner: Attention, role: Role, fallback: Fallback | None
) -> dict[Role, SiteStats]:
    """Find the statistics that share a cache with `role`: k and v of latent attention do."""
    is_joint = owner.kind == "latent" and role is not Role.Q
    roles = (Role.K, Role.V) if is_joint else (role,)
    return {each: _find(stats, owner.site(each), fallback) for each in roles}


def _clip_range(rule: Rule, seen: Collection[SiteStats], fmt: Fp8Format) -> ClipRange:
    """Find the clip range of sites that share a scale."""
    amax = max(float(site.amax.max()) for site in seen)
    histograms = [site.histogram for site in seen if site.histogram is not None]
    is_complete = len(histograms) == len(seen)
    histogram = torch.stack(histograms).sum(0) if is_complete else None
    return find_clip_range(rule, amax=amax, histogram=histogram, fmt=fmt)


def _kv_scale(
    attention: Attention,
    role: Role,
    seen: SiteStats,
    clip_range: ClipRange,
    fmt: Fp8Format,
    *,
    tp: int,
    per_head: bool,
) -> Scale:
    amax = clip_range.apply(seen.amax / attention.query_divisor if role is Role.Q else seen.amax)
    unseen = seen.count == 0
    if per_head:
        values = _scales_or_nan(amax, fmt).unsqueeze(0)
    elif attention.kind == "latent" and role is not Role.Q:
        values = _scales_or_nan(amax.max(), fmt).expand(tp)
    else:
        values = _scales_or_nan(max_per_rank(amax, tp), fmt)
    return Scale(values=values, source=_source(values, unseen=unseen))


def _share_latent(scales: dict[Site, Scale], attention: Attention) -> None:
    k, v = (scales[attention.site(role)] for role in (Role.K, Role.V))
    values = torch.fmax(k.values, v.values)
    source = _source(values, unseen=ScaleSource.UNSEEN in {k.source, v.source})
    for role in (Role.K, Role.V):
        scales[attention.site(role)] = Scale(values=values, source=source)


def _linear_scales(
    seen: SiteStats,
    clip_range: ClipRange,
    linear: Linear,
    part: Part,
    role: Role,
    fmt: Fp8Format,
    tp: int,
) -> dict[int | None, Scale]:
    if linear.num_experts:
        return _expert_scales(seen, clip_range, linear, fmt, tp)
    amax = torch.stack([_rank_amax(seen, linear, part, role, tp, rank) for rank in range(tp)])
    values = _scales_or_nan(clip_range.apply(amax), fmt)
    return {None: Scale(values=values, source=_source(values, unseen=False))}


def _rank_amax(
    seen: SiteStats, linear: Linear, part: Part, role: Role, tp: int, rank: int
) -> torch.Tensor:
    channels = owned_channels(linear, tp, rank)
    if role is Role.INPUT:
        return seen.amax[channels.start : channels.stop].max()
    if linear.shard == "row":
        assert seen.amax_in is not None  # noqa: S101 -- a weight's stats always hold both axes
        return seen.amax_in[channels.start : channels.stop].max()
    return seen.amax[owned_rows(linear, part, tp, rank)].max()


def _expert_scales(
    seen: SiteStats, clip_range: ClipRange, linear: Linear, fmt: Fp8Format, tp: int
) -> dict[int | None, Scale]:
    assert seen.experts is not None  # noqa: S101 -- an expert projection's stats always hold it
    blocks = seen.experts
    if blocks.shape[1] == 1:
        amax = blocks.expand(-1, tp)
    else:
        ranges = [owned_blocks(linear, tp, rank) for rank in range(tp)]
        amax = torch.stack([blocks[:, own.start : own.stop].amax(1) for own in ranges], dim=1)
    values = _scales_or_nan(clip_range.apply(amax), fmt)
    counts = seen.expert_counts
    return {
        expert: Scale(
            values=values[expert],
            source=_source(values[expert], unseen=counts is not None and int(counts[expert]) == 0),
        )
        for expert in range(linear.num_experts)
    }


def _scales_or_nan(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    return torch.where(amax > 0, scale_of(amax, fmt), torch.nan)


def _source(values: torch.Tensor, *, unseen: bool) -> ScaleSource:
    if unseen:
        return ScaleSource.UNSEEN
    return ScaleSource.ALL_ZERO if bool(values.isnan().any()) else ScaleSource.OBSERVED
