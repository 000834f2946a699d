"""Make candidates: an engine's KV cache with some scales, and what `quantize` would write."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from fp8calib.calibration.calibration_stats import CalibrationStats
from fp8calib.calibration.stats_header import calibrate_first
from fp8calib.checkpoint.checkpoint import Checkpoint
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import ModelError, UsageError, cut_list, format_ranges, name_ranges
from fp8calib.formats.table import ScaleSource, ScaleTable
from fp8calib.model.geometry import ModelGeometry, Role, Site
from fp8calib.model.load import LoadedModel
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, find_scheme
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.kv import (
    emulate_kv,
    find_misreads,
    fit_kv,
    make_unscaled_table,
    takes_latents_unscaled,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The unquantized model that candidates are made for, and how they are emulated."""

    checkpoint: Checkpoint
    fingerprint: str
    geometry: ModelGeometry
    model: LoadedModel
    """It may be without weights."""
    numerics: Numerics
    fmt: Fp8Format = E4M3FN
    """The format of statistics and of scale 1.0."""


def build_kv_candidate(
    name: str, table: ScaleTable, numerics: Numerics, *, origin: str
) -> Candidate:
    """Build a candidate that quantizes the KV cache with the scales of `table`.

    `origin` is shown to people.
    """
    kind = "per-head" if table.per_head else "per-tensor"
    ranks = f", {table.tp} ranks" if table.tp > 1 else ""
    description = f"KV cache {table.fmt.name}, {kind} scales{ranks} ({origin})"
    if takes_latents_unscaled(table, numerics):
        description += f"; {numerics.name} ignores scales of latent attention: 1.0"
    notes, reads = [], find_misreads(table, numerics)
    if misread := [layer.index for layer, a in table.geometry.attentions() if a.module in reads]:
        note = f"layers {format_ranges(misread)} read the cache of other layers with their own "
        notes.append(f"{note}scales, 1.0 where the file has none, and so misread it")
    if layers := list_defaulted(table):
        note = f"the file has no scale for {name_ranges(layers)}: 1.0, as engines serve it"
        notes.append(note)
        description += f"; {note}"
    return Candidate(
        name=name,
        description=description,
        quantizers=emulate_kv(table, numerics),
        reads=reads,
        fitted=fit_kv(table.geometry, table.fmt, numerics),
        notes=tuple(notes),
        table=table,
    )


def build_unscaled(
    name: str, geometry: ModelGeometry, fmt: Fp8Format, numerics: Numerics
) -> Candidate:
    """Build the candidate without scales."""
    made = build_kv_candidate(name, make_unscaled_table(geometry, fmt), numerics, origin="")
    return replace(made, description=f"KV cache {fmt.name}, every scale 1.0")


def list_defaulted(table: ScaleTable) -> list[int]:
    """List the layers for which a file has no scale, so that engines use 1.0."""
    return [
        layer.index
        for layer, attention in table.geometry.attentions()
        if table.scales[attention.site(Role.K)].source is ScaleSource.DEFAULTED
    ]


def leave_cache(
    candidate: Candidate, layers: Collection[int], geometry: ModelGeometry
) -> Candidate:
    """Leave the KV cache of some layers in 16 bits, as an engine's option does."""
    known = {layer.index: attention for layer, attention in geometry.attentions()}
    if unknown := sorted(set(layers) - known.keys()):
        raise UsageError(
            f"layer {unknown[0]} has no KV cache that could stay in 16 bits",
            hint=f"layers with one: {format_ranges(known)}",
        )
    if shared := sorted(set(geometry.with_readers(layers)) - set(layers)):
        raise UsageError(
            f"{name_ranges(shared)}: of the same KV cache "
            "as a layer in 16 bits, which would be read as if it were quantized",
            hint="name all layers that share a cache, or none",
        )
    left = {attention.module for index, attention in known.items() if index in layers}
    plain = f"; layers {format_ranges(sorted(layers))} in 16 bits"
    return replace(
        candidate,
        description=candidate.description + plain * candidate.has_cache,
        quantizers={s: each for s, each in candidate.quantizers.items() if s.module not in left},
        fitted={s: each for s, each in candidate.fitted.items() if s.module not in left},
    )


def build_scheme(
    name: str,
    scheme: str,
    target: Target,
    stats: CalibrationStats | None = None,
    *,
    ignore: Sequence[str] = (),
) -> Candidate:
    """Build a candidate: the checkpoint that `quantize` would write with `scheme` and `ignore`."""
    # most candidates have no scheme
    from fp8calib.quantization.calibrated_scales import InputScales  # noqa: PLC0415
    from fp8calib.quantization.select import find_selection  # noqa: PLC0415
    from fp8calib.quantization.settings import make_settings  # noqa: PLC0415
    from fp8calib.verification.emulation.linears import emulate_planned  # noqa: PLC0415

    found, fmt = find_scheme(scheme), target.fmt
    if found.has_static_inputs and stats is None:
        raise UsageError(
            f"--scheme {scheme}: its input scales come from calibration",
            hint=calibrate_first("--scales", recipe="w8a8-static"),
        )
    emulation = emulate_planned(
        make_settings(scheme, ignore=ignore),
        find_selection(target.checkpoint, ignore=ignore),
        target.geometry,
        WeightSource(target.model, target.checkpoint),
        target.numerics,
        fmt=fmt,
        scale_input=InputScales(stats, fmt=fmt).of if stats and found.has_static_inputs else None,
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


def check_sites(candidate: Candidate, geometry: ModelGeometry) -> None:
    """Refuse a candidate that quantizes nothing, or whose sites the model lacks."""
    modules = {attention.module for _, attention in geometry.attentions()}
    modules |= {linear.module for _, linear in geometry.linears()}
    lacking = [site for site in candidate.quantizers if site.module not in modules]
    if lacking:
        raise ModelError(
            f"{candidate.name}: it quantizes {cut_list(lacking, 1)}, which the model does not have",
            hint="are the scales of this model?",
        )
    if not candidate.quantizers and not candidate.weights:
        raise ModelError(
            f"{candidate.name}: it quantizes nothing of this model",
            hint="add --scheme fp8-dynamic if it has no KV cache: this emulates FP8 weights",
        )
