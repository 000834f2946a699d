"""Make candidates: an engine's KV cache with some scales, and what `quantize` would write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from fp8calib.calibration.calibration_stats import RunStats
from fp8calib.calibration.origin import CalibrationOrigin, calibrate_first
from fp8calib.engines.arithmetic import Numerics
from fp8calib.engines.served_dtype import find_served_dtype
from fp8calib.errors import (
    ModelError,
    UsageError,
    VerificationError,
    cut_list,
    format_ranges,
    name_ranges,
)
from fp8calib.formats.compute import compute_linear_scales
from fp8calib.formats.convert import fits_heads
from fp8calib.formats.table import Scale, ScaleTable
from fp8calib.model.geometry import Attention, ModelGeometry, Role, Site
from fp8calib.model.prepared import PreparedModel
from fp8calib.model.tensor_parallel import rank_range
from fp8calib.numerics.formats import E4M3FN, E5M2, Fp8Format
from fp8calib.numerics.rules import AMAX
from fp8calib.numerics.schemes import MX_BLOCK, find_scheme
from fp8calib.verification.emulation.candidate import Candidate, Reads
from fp8calib.verification.emulation.fake_quantize import Quantizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The unquantized model that candidates are made for, and how they are emulated."""

    prepared: PreparedModel
    """It may be without weights."""
    fingerprint: str
    numerics: Numerics
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""
    plain_caches: Collection[int] = ()
    """The layers whose KV cache stays in 16 bits, as an engine's option says."""


def check_model(name: str, origin: CalibrationOrigin | None, target: Target) -> None:
    """Refuse scales of another model than this one, or than that which it was made from.

    A model in memory may have another config and dtype than its files. Without weights, in a dry
    run, there is nothing to compare.
    """
    checkpoint = target.prepared.checkpoint
    if origin is None or origin.model == target.fingerprint or not checkpoint.has_weights:
        return
    # most scales are of the very files
    from fp8calib.calibration.unquantized_tensors import compare_with_base  # noqa: PLC0415
    from fp8calib.formats.read import check_origin  # noqa: PLC0415
    from fp8calib.model.live_model import LiveCheckpoint  # noqa: PLC0415

    is_made = bool(checkpoint.form) or isinstance(checkpoint, LiveCheckpoint)
    if (
        not (is_made and origin.unquantized)
        or (compare_with_base(origin.unquantized, checkpoint)[0])
    ):
        check_origin(name, origin, target.fingerprint)


def build_kv_candidate(
    name: str, table: ScaleTable, numerics: Numerics, *, origin: str = ""
) -> Candidate:
    """Build a candidate that quantizes the KV cache with the scales of `table`.

    `origin` is shown to people; scales without one are 1.0.
    """
    geometry, notes = table.geometry, []
    kind = "per-head" if table.per_head else "per-tensor"
    ranks = f", {table.tp} ranks" if table.tp > 1 else ""
    description = f"KV cache {table.fmt.name}, {kind} scales{ranks} ({origin})"
    if geometry.has_latent_attention and not numerics.kv_scales_latents:
        description += f"; {numerics.name} ignores scales of latent attention: 1.0"
    reads = find_misreads(table, numerics)
    if misread := [layer.index for layer, a in geometry.attentions() if a.module in reads]:
        note = f"layers {format_ranges(misread)} read the cache of other layers with their own "
        notes.append(f"{note}scales, 1.0 where the file has none, and so misread it")
    if layers := list_defaulted(table):
        notes.append(f"the file has no scale for {name_ranges(layers)}: 1.0, as engines serve it")
        description += f"; {notes[-1]}"
    return Candidate(
        name=name,
        description=description if origin else f"KV cache {table.fmt.name}, every scale 1.0",
        quantizers=emulate_kv(table, numerics),
        reads=reads,
        notes=tuple(notes),
        table=table,
    )


def list_defaulted(table: ScaleTable) -> list[int]:
    """List the layers for which a file has no scale, so that engines use 1.0."""
    return [
        layer.index
        for layer, attention in table.geometry.attentions()
        if table.scales[attention.site(Role.K)].source == "defaulted"
    ]


def fit_to_model(candidate: Candidate, target: Target) -> Candidate:
    """Leave the KV cache of the target's plain layers in 16 bits.

    Refuse a candidate that quantizes nothing, or whose sites the model lacks.
    """
    geometry, plain_caches = target.prepared.geometry, target.plain_caches
    known = {layer.index: attention for layer, attention in geometry.attentions()}
    modules = {attention.module for attention in known.values()}
    modules |= {linear.module for _, linear in geometry.linears()}
    if lacking := [site for site in candidate.quantizers if site.module not in modules]:
        raise ModelError(
            f"{candidate.name}: it quantizes {cut_list(lacking, 1)}, which the model does not have",
            hint="are the scales of this model?",
        )
    if plain_caches:
        if unknown := sorted(set(plain_caches) - known.keys()):
            raise UsageError(
                f"layer {unknown[0]} has no KV cache that could stay in 16 bits",
                hint=f"layers with one: {format_ranges(known)}",
            )
        if shared := sorted(set(geometry.with_readers(plain_caches)) - set(plain_caches)):
            raise UsageError(
                f"{name_ranges(shared)}: of the same KV cache "
                "as a layer in 16 bits, which would be read as if it were quantized",
                hint="name all layers that share a cache, or none",
            )
        plain = {known[index].module for index in plain_caches}
        where = f"; layers {format_ranges(sorted(plain_caches))} in 16 bits"
        candidate = replace(
            candidate,
            description=candidate.description + where * candidate.has_cache,
            quantizers={s: q for s, q in candidate.quantizers.items() if s.module not in plain},
        )
    if not candidate.quantizers and not candidate.weights:
        raise ModelError(
            f"{candidate.name}: it quantizes nothing of this model",
            hint="add --scheme fp8-dynamic if it has no KV cache: this emulates FP8 weights",
        )
    return candidate


def build_scheme(
    name: str,
    scheme: str,
    target: Target,
    stats: RunStats | None = None,
    *,
    ignore: Sequence[str] = (),
) -> Candidate:
    """Build a candidate: the checkpoint that `quantize` would write with `scheme` and `ignore`."""
    # most candidates have no scheme
    from fp8calib.quantization.calibrated_scales import find_input_scale  # noqa: PLC0415
    from fp8calib.quantization.select import find_selection  # noqa: PLC0415
    from fp8calib.quantization.settings import make_settings  # noqa: PLC0415
    from fp8calib.verification.emulation.weights import emulate_planned  # noqa: PLC0415

    found, fmt, prepared = find_scheme(scheme), target.fmt, target.prepared
    if found.has_static_inputs and stats is None:
        raise UsageError(
            f"--scheme {scheme}: its input scales come from calibration",
            hint=calibrate_first("--scales", recipe="w8a8-static"),
        )
    scale_input = None
    if stats is not None and found.has_static_inputs:
        table = compute_linear_scales(stats, fmt)
        scale_input = partial(find_input_scale, stats, table, AMAX)
    emulation = emulate_planned(
        make_settings(scheme, ignore=ignore),
        find_selection(prepared.checkpoint, ignore=ignore),
        prepared.geometry,
        prepared.weights,
        target.numerics,
        fmt=fmt,
        scale_input=scale_input,
    )
    rounding = describe_rounding(emulation.quantizers, target.numerics)
    description = f"{scheme}: {found.description}, {fmt.name}{rounding}"
    return replace(emulation, name=name, description=description)


def describe_rounding(quantizers: Mapping[Site, Quantizer], numerics: Numerics) -> str:
    """Say that scales become powers of two, unless the format asks for them; else empty."""
    rounded = [each for each in quantizers.values() if each.power_of_two]
    if all(each.block == MX_BLOCK for each in rounded):
        return ""
    return f"; {numerics.name} rounds the scales of blocks and groups up to powers of two"


# --- the quantizers of an engine's KV cache -------------------------------------------------------


def make_unscaled_table(geometry: ModelGeometry, fmt: Fp8Format) -> ScaleTable:
    """Make the table of an engine without scales: 1.0 for K and V of every layer."""
    one = Scale(values=torch.ones(1), source="observed")
    return ScaleTable(
        geometry=geometry,
        fmt=fmt,
        tp=1,
        per_head=False,
        scales={a.site(role): one for _, a in geometry.attentions() for role in (Role.K, Role.V)},
    )


def emulate_kv(table: ScaleTable, numerics: Numerics) -> dict[Site, Quantizer]:
    """Give the quantizers of K, V and, where the engine quantizes them, q and probabilities."""
    table = _serve_table(table, numerics)
    quantizers: dict[Site, Quantizer] = {}
    stored = {
        "rounding": numerics.kv_rounding,
        "by_reciprocal": numerics.kv_by_reciprocal,
        "in_model_dtype": numerics.kv_in_model_dtype,
        "saturates": table.fmt.name not in numerics.kv_unsaturated,
    }
    for _, attention in table.geometry.attentions():
        ways: dict[Role, dict[str, Any]] = {}
        if attention.producer is None:
            ways |= {Role.K: stored, Role.V: stored}
        if numerics.quantizes_query and attention.kind == "heads":
            ways[Role.Q] = {"by_reciprocal": numerics.query_by_reciprocal}
        for role, how in ways.items():
            scale, is_used = _find_scale(table, attention, role, numerics)
            quantizer = Quantizer(fmt=table.fmt, scale=scale, is_scaled=is_used, **how)
            quantizers[attention.site(role)] = quantizer
        if numerics.probability_factor and table.fmt is E4M3FN and attention.kind == "heads":
            factor = torch.tensor(1 / numerics.probability_factor)
            tile = numerics.find_tile(attention.k_head_dim)
            quantizers[attention.site(Role.P)] = Quantizer(fmt=table.fmt, scale=factor, tile=tile)
    return quantizers


def find_misreads(table: ScaleTable, numerics: Numerics) -> Reads:
    """Find the layers that read another's cache with other scales than it was written with."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    if not numerics.kv_shared_own_scale:
        return found
    table = _serve_table(table, numerics)
    for _, attention in table.geometry.attentions():
        producer = table.geometry.producer_of(attention)
        if producer is attention:
            continue
        factors = []
        for role in (Role.K, Role.V):
            own = torch.tensor(1.0)
            if table.scales[attention.site(role)].source != "absent":
                own, _ = _find_scale(table, attention, role, numerics)
            factors.append(own / _find_scale(table, producer, role, numerics)[0])
        if any(bool((factor != 1).any()) for factor in factors):
            found[attention.module] = factors[0], factors[1]
    return found


def explain_plain_cache(table: ScaleTable, numerics: Numerics) -> str:
    """Say why the engine's KV cache stays in 16 bits with these scales; empty if it is FP8."""
    model_type = table.geometry.model_type
    is_rounded = table.dialect in numerics.kv_rounded_dialects
    if not is_rounded or model_type not in numerics.kv_plain_types:
        return ""
    return f"{numerics.name} caches {model_type} in 16 bits whatever --kv-cache-dtype says"


def _serve_table(table: ScaleTable, numerics: Numerics) -> ScaleTable:
    """Refuse scales that the engine cannot use; give them as it holds them.

    It rounds those of some dialects to the dtype that the model is served in.
    """
    if not fits_heads(table.geometry, table.tp):
        raise ModelError(
            f"the scales are for {table.tp} ranks, and the model's heads cannot be split over them",
            hint="is the file of another model? the ranks must divide the attention heads",
        )
    engine, plain = numerics.name, explain_plain_cache(table, numerics)
    is_scaled = any(bool((scale.values != 1).any()) for scale in table.scales.values())
    has_latents = table.geometry.has_latent_attention
    faults = (
        (
            bool(plain),
            plain,
            "write the scales as a kv-overlay: its kv_cache_scheme makes the cache FP8",
        ),
        (
            table.per_head and not numerics.kv_per_head,
            f"the scales are per head, and {engine} loads one per tensor",
            "use an engine that supports them: --engine vllm",
        ),
        (
            is_scaled and has_latents and table.dialect in numerics.kv_misread_latents,
            f"{engine} stores latents without these scales, but multiplies by them",
            "serve the model without scales of latents, or with 1.0",
        ),
        (
            is_scaled and table.fmt is E5M2 and not numerics.kv_scales_e5m2,
            f"{engine} uses no scales with an e5m2 KV cache",
            "use --fp8-dtype e4m3fn; e5m2 is verified only at scale 1.0",
        ),
    )
    for applies, why, hint in faults:
        if applies:
            raise VerificationError(why, hint=hint)
    if table.dialect not in numerics.kv_rounded_dialects:
        return table
    name = find_served_dtype(table.geometry, bfloat16_types=numerics.bfloat16_types)
    rounded = {}
    for site, scale in table.scales.items():
        values = scale.values.to(getattr(torch, name)).float()
        if not bool(((values > 0) & values.isfinite()).all()):
            raise VerificationError(
                f"{numerics.name} rounds scales to {name}, in which that of {site} is "
                f"{values.max().item():g}",
                hint="store the scales as compressed-tensors does (kv-overlay): they stay fp32",
            )
        rounded[site] = replace(scale, values=values)
    return replace(table, scales=rounded)


def _find_scale(
    table: ScaleTable, attention: Attention, role: Role, numerics: Numerics
) -> tuple[torch.Tensor, bool]:
    """Find the scale that the engine uses for K, V or q: 0-dim, or [H, 1, 1] where heads differ.

    Tells also whether it would use another scale there than 1.0.
    """
    site, is_query = attention.site(role), role is Role.Q
    is_used = attention.kind != "latent" or numerics.kv_scales_latents
    if is_query:
        is_used = not numerics.query_unscaled
    is_used = is_used and (table.fmt is not E5M2 or numerics.kv_scales_e5m2)
    if not is_used or (is_query and site not in table.scales):
        return torch.tensor(1.0), is_used
    values = table.scales[site].values
    if table.per_head:
        shares_largest = numerics.kv_heads_share_largest and not is_query
        return values.max() if shares_largest else values.reshape(-1, 1, 1), is_used
    if bool((values == values[0]).all()):
        return values[0].float(), is_used
    num_heads = attention.num_heads if is_query else attention.num_kv_heads
    spread = torch.zeros(num_heads)
    for rank in reversed(range(len(values))):  # the first rank that owns a head counts
        heads = rank_range(num_heads, len(values), rank)
        spread[heads.start : heads.stop] = values[rank]
    return spread.reshape(-1, 1, 1), is_used
