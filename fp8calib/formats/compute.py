"""Compute scales from statistics, `scale = amax / fmt.max` in fp32, and write them.

A rule (`fp8calib.numerics.rules`) may replace the amax of an activation by another magnitude. Like
every server, and unlike torch's float8 training code, this package multiplies by the scale to
dequantize. Where the amax is zero or no token reached a site, the scale is a listed fallback.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from math import isnan
from pathlib import Path

import torch

from fp8calib.calibration.calibration_stats import RunStats, SiteStats
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.errors import ExportError, cut_list, format_count
from fp8calib.formats.convert import max_per_rank
from fp8calib.formats.dialect import NO_ATTACHMENT, Attachment
from fp8calib.formats.registry import find_dialect
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import KV_ROLES, Linear, ModelGeometry, Part, Role, Site
from fp8calib.model.module_paths import match_names
from fp8calib.model.tensor_parallel import check_heads, owned_blocks, owned_channels, owned_rows
from fp8calib.numerics.clip_range import ClipRange, find_clip_range
from fp8calib.numerics.encode import scale_of
from fp8calib.numerics.formats import Fp8Format
from fp8calib.numerics.rules import AMAX, ONE, PLAIN_RULES, Fallback, Rule, ScaleRules


def find_site_rules(rules: Mapping[str, Rule], geometry: ModelGeometry) -> dict[Site, Rule]:
    """Give K and V the rule of the first pattern that matches `model.layers.3.self_attn.k`.

    Sites that none matches are left out.

    Raises:
        RecipeError: a pattern matches no K or V, or is not a valid regular expression.
    """
    attentions = [attention for _, attention in geometry.attentions()]
    sites = {str(each.site(role)): each.site(role) for each in attentions for role in KV_ROLES}
    found: dict[Site, Rule] = {}
    for pattern, rule in rules.items():
        matched = match_names(pattern, list(sites), "scales.rules")
        found = dict.fromkeys((sites[name] for name in matched), rule) | found
    return found


def compute_kv_scales(
    stats: RunStats,
    fmt: Fp8Format,
    *,
    tp: int = 1,
    per_head: bool = False,
    query: bool = False,
    rules: ScaleRules = PLAIN_RULES,
) -> ScaleTable:
    """Compute scales of K and V (and of q when asked) for every layer that reads a KV cache.

    With `tp` ranks a per-tensor scale covers the heads of its rank. A per-head scale is independent
    of the rank, so per-head tables have one rank. Latent attention stores latent and rotary part in
    one cache under one scale: both get the larger one, and a rule sees both as one tensor.

    A fallback of None is `layer-max` for tensors of zeros, and refuses sites that no token reached.
    Where a rule needs a missing histogram (q never has one), the amax is used, and the table lists
    the site in `kept_amax`.

    Raises:
        UsageError: `tp` does not fit the heads.
        RecipeError: a pattern of the rules matches no K or V.
        ExportError: the stats lack a site, or the fallback is `refuse` and a site needs it.
    """
    check_heads(stats.geometry, tp)
    by_site, fallback = find_site_rules(rules.rules, stats.geometry), rules.fallback
    roles = (Role.K, Role.V, Role.Q) if query else KV_ROLES
    scales: dict[Site, Scale] = {}
    kept_amax: dict[Site, str] = {}
    for _, attention in stats.geometry.attentions():
        producer = stats.geometry.producer_of(attention)
        for role in roles:
            owner = attention if role is Role.Q else producer
            is_latent = owner.kind == "latent" and role is not Role.Q
            seen = [
                _find(stats, owner.site(each), fallback)
                for each in (KV_ROLES if is_latent else (role,))
            ]
            own = by_site.get(owner.site(role), rules.rule)
            if own == ONE and role is Role.Q:  # no rule makes the scale of q 1.0
                own = AMAX
            clip_range = _clip_range(own, seen, fmt)
            amax = torch.stack([each.amax for each in seen]).amax(0)
            amax = clip_range.apply(amax / attention.query_divisor if role is Role.Q else amax)
            if per_head:
                amax = amax.unsqueeze(0)
            else:
                amax = amax.max().expand(tp) if is_latent else max_per_rank(amax, tp)
            scale = _make_scale(amax, fmt, unseen=any(each.count == 0 for each in seen))
            if owner is not attention:
                scale = replace(scale, source="shared")
            elif clip_range.kept_amax:
                kept_amax[attention.site(role)] = clip_range.kept_amax
            scales[attention.site(role)] = scale
    return ScaleTable(
        geometry=stats.geometry,
        fmt=fmt,
        tp=tp,
        per_head=per_head,
        scales=_fill_missing(scales, {site: [[each]] for site, each in scales.items()}, fallback),
        kept_amax=kept_amax,
        origin=stats.origin,
    )


def compute_linear_scales(
    stats: RunStats,
    fmt: Fp8Format,
    *,
    tp: int = 1,
    rules: ScaleRules = PLAIN_RULES,
) -> ScaleTable:
    """Compute per-tensor input and weight scales of every attention and MLP projection.

    Every projection in a fused weight (`q_proj` of a `qkv_proj`) has its own scale, and so does
    every expert. A scale covers the rank's rows of a column-parallel weight, and the rank's
    channels of a row-parallel weight and its input. The rule of all tensors applies to inputs;
    weights always use their amax.

    Raises:
        ExportError: the stats lack a site, or the fallback is `refuse` and a site needs it.
    """
    scales: dict[Site, Scale] = {}
    kept_amax: dict[Site, str] = {}
    pools: dict[Site, list[list[Scale]]] = {}
    layer_pools: dict[tuple[int, Role], list[Scale]] = {}
    by_role, fallback = {Role.INPUT: rules.rule, Role.WEIGHT: AMAX}, rules.fallback
    for layer, linear in stats.geometry.linears():
        if linear.section == "other":
            continue
        for part, role in product(linear.parts, by_role):
            site = Site(linear.module, role)
            seen = _find(stats, site, fallback)
            clip_range = _clip_range(by_role[role], [seen], fmt)
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
        scales=_fill_missing(scales, pools, fallback),
        kept_amax=kept_amax,
        origin=stats.origin,
    )


def write_formats(
    stats: RunStats,
    formats: Sequence[str],
    out: Path,
    *,
    fmt: Fp8Format,
    tps: Sequence[int],
    source: Checkpoint | None,
    query: bool,
    rules: ScaleRules = PLAIN_RULES,
    quantized: Mapping[int, ScaleTable] | None = None,
    attachment: Attachment = NO_ATTACHMENT,
) -> list[str]:
    """Write the scales of statistics in every format, with a file per degree where formats differ.

    The folder `out` exists and has none of the entries that `list_outputs` names. `query` writes
    `q_scale` in the dialects that have it. `quantized` holds, for each degree, the scales of the
    rank weights that the caller writes beside these files; `rfc` contains them and names the
    weights' files. `attachment` records how the scales belong to a model that is quantized already.

    Returns:
        What a user should know about the files.

    Raises:
        UsageError: a format or degree is not valid, or the model is missing.
        ExportError: a scale cannot be computed, or a file not written.
    """
    # candidates of `verify` are computed, not written
    from fp8calib.formats.write import check_export, write_table  # noqa: PLC0415

    check_export(stats.geometry, formats, tps, fmt)
    kv_scales = cache(partial(compute_kv_scales, stats, fmt, rules=rules))
    linear_scales = cache(partial(compute_linear_scales, stats, fmt, rules=rules))
    notes: list[str] = []
    for dialect in map(find_dialect, dict.fromkeys(formats)):
        for tp in dialect.degrees(tps):
            has_query = query and dialect.has_query
            linears = None
            if dialect.has_linears:
                linears = linear_scales(tp=tp) if quantized is None else quantized[tp]
            place = Path(dialect.path(tp))
            notes += write_table(
                kv_scales(tp=tp, per_head=dialect.per_head, query=has_query),
                dialect.name,
                out / place,
                source=source,
                shown=place,
                attachment=attachment,
                linears=linears,
                with_rank_weights=quantized is not None,
            )
        if dialect.has_linears:
            weights = (item for item in stats.header.skipped if item.site.endswith(".weight"))
            notes += (f"{item.site}: not in {dialect.name}: {item.why}" for item in weights)
    return list(dict.fromkeys(notes))


def _find(stats: RunStats, site: Site, fallback: Fallback | None) -> SiteStats:
    if site not in stats.sites:
        reasons = [skipped.why for skipped in stats.header.skipped if skipped.site == str(site)]
        raise ExportError(
            f"the statistics do not contain {site}" + "".join(f": {why}" for why in reasons),
            hint="" if reasons else "calibrate with a recipe that observes it",
        )
    found = stats.sites[site]
    if found.count == 0 and site.role is not Role.WEIGHT and fallback is None:
        raise ExportError(f"no token reached {site}", hint="use --fallback layer-max or one")
    return found


def _clip_range(rule: Rule, seen: Collection[SiteStats], fmt: Fp8Format) -> ClipRange:
    """Find the clip range of sites that share a scale."""
    amax = max(float(site.amax.max()) for site in seen)
    histograms = [site.histogram for site in seen if site.histogram is not None]
    is_complete = len(histograms) == len(seen)
    histogram = torch.stack(histograms).sum(0) if is_complete else None
    return find_clip_range(rule, amax=amax, histogram=histogram, fmt=fmt)


def _linear_scales(
    seen: SiteStats,
    clip_range: ClipRange,
    linear: Linear,
    part: Part,
    role: Role,
    fmt: Fp8Format,
    tp: int,
) -> dict[int | None, Scale]:
    """Compute the scales of one projection, by the number of the expert; None without experts."""
    ranks, counts = range(tp), None
    if linear.num_experts:
        blocks, counts = seen.experts, seen.expert_counts
        assert blocks is not None  # noqa: S101 -- an expert projection's stats always hold it
        if blocks.shape[1] == 1:
            amax = blocks.expand(-1, tp)
        else:
            spans = (owned_blocks(linear, tp, rank) for rank in ranks)
            amax = torch.stack([blocks[:, own.start : own.stop].amax(1) for own in spans], dim=1)
    elif role is Role.WEIGHT and linear.shard != "row":
        rows = (owned_rows(linear, part, tp, rank) for rank in ranks)
        amax = torch.stack([seen.amax[own].max() for own in rows]).unsqueeze(0)
    else:
        whole = seen.amax if role is Role.INPUT else seen.amax_in
        assert whole is not None  # noqa: S101 -- a weight's stats always hold both axes
        spans = (owned_channels(linear, tp, rank) for rank in ranks)
        amax = torch.stack([whole[own.start : own.stop].max() for own in spans]).unsqueeze(0)
    return {
        expert: _make_scale(own, fmt, unseen=counts is not None and not counts[expert])
        for expert, own in zip(linear.experts, clip_range.apply(amax), strict=True)
    }


def _make_scale(amax: torch.Tensor, fmt: Fp8Format, *, unseen: bool) -> Scale:
    """Compute the scale of an amax; NaN where it is zero."""
    values = torch.where(amax > 0, scale_of(amax, fmt), torch.nan)
    if unseen:
        return Scale(values=values, source="unseen")
    is_zero = bool(values.isnan().any())
    return Scale(values=values, source="all-zero" if is_zero else "observed")


def _fill_missing(
    scales: Mapping[Site, Scale],
    pools: Mapping[Site, list[list[Scale]]],
    fallback: Fallback | None,
) -> dict[Site, Scale]:
    """Replace NaN scales, from the first of a site's pools that has a scale.

    Raises:
        ExportError: `fallback` is `REFUSE` and a scale is missing.
    """
    missing = [site for site, scale in scales.items() if bool(scale.values.isnan().any())]
    if missing and fallback == "refuse":
        raise ExportError(
            f"no scale can be computed for {format_count(len(missing), 'tensor')} "
            f"({cut_list(missing, 5)}): their amax is zero",
            hint="use --fallback layer-max (the largest scale of the same role in the layer, or "
            "1.0 where there is none)",
        )
    filled = dict(scales)
    for site in missing:
        values, substitute = scales[site].values, 1.0
        for pool in pools[site] if fallback != "one" else ():
            numbers = [number for other in pool for number in other.values.flatten().tolist()]
            if known := [number for number in numbers if not isnan(number)]:
                substitute = max(known)
                break
        filled[site] = Scale(
            values=values.nan_to_num(substitute),
            source=scales[site].source,
            is_substitute=bool(values.isnan().all()),
        )
    return filled
