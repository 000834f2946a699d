"""ScaleTable: what the statistics mean. `x ~= q * scale`, `scale = amax / fmt.max`, fp32.

A rule (`fp8calib.rules`) may put another magnitude in the place of the amax of an activation.

The convention is that of every server (multiply to dequantize); torch's float8 training code names
the reciprocal. A scale is always finite and positive, and never made up in silence: a tensor that
was all zeros, or an expert that no token reached, takes a fallback and is listed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import product

import torch

from fp8calib.errors import ExportError
from fp8calib.fp8.formats import Fp8Format
from fp8calib.geometry.model_geometry import Attention, Linear, ModelGeometry, Part
from fp8calib.geometry.sites import Role, Site
from fp8calib.geometry.tensor_parallel import (
    check_heads,
    owned_blocks,
    owned_channels,
    owned_rows,
    rank_range,
)
from fp8calib.scales.rules import AMAX, ClipRange, Rule, find_clip_range
from fp8calib.stats.calibration_origin import CalibrationOrigin
from fp8calib.stats.calibration_stats import CalibrationStats
from fp8calib.stats.statistic import SiteStats

SMALLEST_SCALE = 2.0**-126
"""The smallest normal fp32, so that 1 / scale is finite."""


class Fallback(StrEnum):
    """What a site gets whose amax is zero, or that nothing was seen at."""

    LAYER_MAX = "layer-max"
    """The largest scale of the same role in the layer; 1.0 where there is none."""
    ONE = "one"
    """1.0."""
    REFUSE = "refuse"
    """An error that names the sites."""


class ScaleSource(StrEnum):
    """Where a scale comes from."""

    OBSERVED = "observed"
    SHARED = "shared"
    """Another layer's: this layer reads that layer's cache."""
    ALL_ZERO = "all-zero"
    """The fallback: the amax was zero."""
    UNSEEN = "unseen"
    """The fallback: no token came by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The scales of one site: fp32 [tp], or [tp, heads] per head."""

    values: torch.Tensor
    source: ScaleSource
    is_substitute: bool = False
    """Nothing of it was computed from what was seen at the site."""

    def per_rank(self) -> list[float]:
        """Give one number per rank (per-tensor scales only)."""
        return [float(value) for value in self.values]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleTable:
    """Scales of one model, in one format, for one tensor-parallel degree."""

    geometry: ModelGeometry
    fmt: Fp8Format
    tp: int
    per_head: bool
    scales: Mapping[Site, Scale]
    kept_amax: Mapping[Site, str] = field(default_factory=dict)
    """Why the rule that was asked for could not be followed at a site, whose amax stands."""
    origin: CalibrationOrigin | None = None
    """None where nobody wrote it down."""

    def kv(self, attention: Attention, rank: int = 0) -> float:
        """Give the one scale that covers k and v of a layer on `rank`: the larger of the two.

        A side of zeros fits any scale, so its substitute does not count beside a real one.
        """
        pair = [self.scales[attention.site(role)] for role in (Role.K, Role.V)]
        real = [scale for scale in pair if not scale.is_substitute]
        return max(float(scale.values[rank].max()) for scale in real or pair)

    def not_observed(self) -> list[tuple[Site, Scale]]:
        """List the sites whose scale was not computed from what was seen there."""
        return [item for item in self.scales.items() if item[1].source is not ScaleSource.OBSERVED]


def compute_kv_scales(
    stats: CalibrationStats,
    fmt: Fp8Format,
    *,
    tp: int = 1,
    per_head: bool = False,
    query: bool = False,
    fallback: Fallback | None = None,
    rule: Rule = AMAX,
) -> ScaleTable:
    """Compute scales of K and V (and of q when asked) for every layer that reads a KV cache.

    With `tp` ranks a per-tensor scale covers the heads of its rank; a per-head scale belongs to its
    head, whatever the rank, so per-head tables have one rank. Latent attention stores latent and
    rotary part in one cache under one scale, so both get the larger, and a rule sees both as one.

    A fallback of None takes `layer-max` for tensors of zeros, and refuses sites that no token came
    by. Where `rule` needs a histogram that is not there (q never has one), the amax stands, and the
    table says so.

    Raises:
        UsageError: `tp` does not fit the heads.
        ExportError: the stats lack a site, or `fallback` is `refuse` and a site needs it.
    """
    check_heads(stats.geometry, tp)
    roles = (Role.K, Role.V, Role.Q) if query else (Role.K, Role.V)
    scales: dict[Site, Scale] = {}
    kept_amax: dict[Site, str] = {}
    for _, attention in stats.geometry.attentions():
        producer = _producer(stats.geometry, attention)
        for role in roles:
            site, owner = attention.site(role), attention if role is Role.Q else producer
            seen = _find(stats, owner.site(role), fallback)
            reach = _find_reach(rule, _in_one_cache(stats, owner, role, fallback), fmt)
            scale = _kv_scale(attention, role, seen, reach, fmt, tp=tp, per_head=per_head)
            if owner is not attention:
                scale = Scale(values=scale.values, source=ScaleSource.SHARED)
            elif reach.kept_amax:
                kept_amax[site] = reach.kept_amax
            scales[site] = scale
        if attention.kind == "latent":
            _share_latent(scales, attention)
    pools = {site: [[scale]] for site, scale in scales.items()}
    return ScaleTable(
        geometry=stats.geometry,
        fmt=fmt,
        tp=tp,
        per_head=per_head,
        scales=_fill(scales, pools, fallback),
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

    Fused weights are told apart (`q_proj` of a `qkv_proj`), experts one by one. Column-parallel
    weights take the rows of the rank, row-parallel weights and inputs its channels. `rule` concerns
    inputs; weights always take their amax.

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
            reach = _find_reach(rules[role], [seen], fmt)
            if reach.kept_amax:
                kept_amax[site] = reach.kept_amax
            by_expert = _linear_scales(seen, reach, linear, part, role, fmt, tp)
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
        scales=_fill(scales, pools, fallback),
        kept_amax=kept_amax,
        origin=stats.origin,
    )


def scale_of(amax: torch.Tensor, fmt: Fp8Format) -> torch.Tensor:
    """Turn magnitudes into scales: amax / fmt.max in fp32, at least 2**-126."""
    # By a tensor of its device: by a number, CUDA would multiply with the reciprocal, 1 ulp off.
    most = amax.new_full((), fmt.max, dtype=torch.float32)
    return (amax.to(torch.float32) / most).clamp(min=SMALLEST_SCALE)


def _producer(geometry: ModelGeometry, attention: Attention) -> Attention:
    if attention.producer is None:
        return attention
    producer = geometry.layers[attention.producer].attention
    if producer is None:
        raise ExportError(f"{attention.module} reads the K/V of a layer that caches none")
    return producer


def _find(stats: CalibrationStats, site: Site, fallback: Fallback | None) -> SiteStats:
    if site not in stats.sites:
        reasons = [skipped.why for skipped in stats.header.skipped if skipped.site == str(site)]
        raise ExportError(
            f"the stats hold nothing for {site}" + "".join(f": {why}" for why in reasons),
            hint="" if reasons else "calibrate with a recipe that observes it",
        )
    found = stats.sites[site]
    if found.count == 0 and site.role is not Role.WEIGHT and fallback is None:
        raise ExportError(
            f"no token was seen at {site}", hint="name what it should get with --fallback"
        )
    return found


def _in_one_cache(
    stats: CalibrationStats, owner: Attention, role: Role, fallback: Fallback | None
) -> list[SiteStats]:
    """Find all that shares a cache with `role`: of latent attention k and v do."""
    is_joint = owner.kind == "latent" and role is not Role.Q
    roles = (Role.K, Role.V) if is_joint else (role,)
    return [_find(stats, owner.site(each), fallback) for each in roles]


def _find_reach(rule: Rule, seen: Sequence[SiteStats], fmt: Fp8Format) -> ClipRange:
    """Find what `rule` makes of sites that share a scale."""
    amax = max(float(site.amax.max()) for site in seen)
    histograms = [site.histogram for site in seen if site.histogram is not None]
    is_complete = len(histograms) == len(seen)
    histogram = torch.stack(histograms).sum(0) if is_complete else None
    return find_clip_range(rule, amax=amax, histogram=histogram, fmt=fmt)


def _kv_scale(
    attention: Attention,
    role: Role,
    seen: SiteStats,
    reach: ClipRange,
    fmt: Fp8Format,
    *,
    tp: int,
    per_head: bool,
) -> Scale:
    amax = reach.apply(seen.amax / attention.query_divisor if role is Role.Q else seen.amax)
    unseen = seen.count == 0
    if per_head:
        values = _scales_or_nan(amax, fmt).unsqueeze(0)
    elif attention.kind == "latent" and role is not Role.Q:
        values = _scales_or_nan(amax.max(), fmt).expand(tp)
    else:
        ranges = (rank_range(len(amax), tp, rank) for rank in range(tp))
        values = _scales_or_nan(
            torch.stack([amax[heads.start : heads.stop].max() for heads in ranges]), fmt
        )
    return Scale(values=values, source=_source(values, unseen=unseen))


def _share_latent(scales: dict[Site, Scale], attention: Attention) -> None:
    k, v = (scales[attention.site(role)] for role in (Role.K, Role.V))
    values = torch.fmax(k.values, v.values)
    source = _source(values, unseen=ScaleSource.UNSEEN in {k.source, v.source})
    for role in (Role.K, Role.V):
        scales[attention.site(role)] = Scale(values=values, source=source)


def _linear_scales(
    seen: SiteStats,
    reach: ClipRange,
    linear: Linear,
    part: Part,
    role: Role,
    fmt: Fp8Format,
    tp: int,
) -> dict[int | None, Scale]:
    if linear.num_experts:
        return _expert_scales(seen, reach, linear, fmt, tp)
    amax = torch.stack([_rank_amax(seen, linear, part, role, tp, rank) for rank in range(tp)])
    values = _scales_or_nan(reach.apply(amax), fmt)
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
    seen: SiteStats, reach: ClipRange, linear: Linear, fmt: Fp8Format, tp: int
) -> dict[int | None, Scale]:
    assert seen.experts is not None  # noqa: S101 -- an expert projection's stats always hold it
    blocks = seen.experts
    if blocks.shape[1] == 1:
        amax = blocks.expand(-1, tp)
    else:
        ranges = [owned_blocks(linear, tp, rank) for rank in range(tp)]
        amax = torch.stack([blocks[:, own.start : own.stop].amax(1) for own in ranges], dim=1)
    values = _scales_or_nan(reach.apply(amax), fmt)
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


def _fill(
    scales: Mapping[Site, Scale],
    pools: Mapping[Site, list[list[Scale]]],
    fallback: Fallback | None,
) -> dict[Site, Scale]:
    dead = [site for site, scale in scales.items() if bool(scale.values.isnan().any())]
    if dead and fallback is Fallback.REFUSE:
        listed = ", ".join(map(str, dead[:5])) + (f" and {len(dead) - 5} more" if dead[5:] else "")
        raise ExportError(
            f"no scale can be computed for {len(dead)} sites ({listed}): their amax is zero",
            hint="--fallback layer-max takes the largest scale of the same role in the layer",
        )
    return {
        site: Scale(
            values=_filled(scale, pools[site], fallback),
            source=scale.source,
            is_substitute=bool(scale.values.isnan().all()),
        )
        for site, scale in scales.items()
    }


def _filled(scale: Scale, pools: Iterable[list[Scale]], fallback: Fallback | None) -> torch.Tensor:
    """Fill what could not be computed from the first pool that knows a scale: siblings first."""
    if not bool(scale.values.isnan().any()):
        return scale.values
    substitute = 1.0
    for pool in pools if fallback is not Fallback.ONE else ():
        known = torch.cat([torch.zeros(0), *(other.values.flatten() for other in pool)])
        known = known[~known.isnan()]
        if len(known):
            substitute = float(known.max())
            break
    return scale.values.nan_to_num(substitute)
