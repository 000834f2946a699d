"""Check the KV scales that a reader found, join ranks and fill in shared layers."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fp8calib.calibration.calibration_origin import CalibrationOrigin
from fp8calib.errors import ModelError, cut_list, name_ranges
from fp8calib.formats.dialect import ParsedScales
from fp8calib.formats.refusals import refusal
from fp8calib.formats.table import ScaleSource
from fp8calib.model.shapes import KV_ROLES, ModelGeometry, Site
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format

_SMALLEST_KEPT_BY_FP16 = 2.0**-20
"""16 times the smallest fp16 number."""
ONE_FILLS_BOTH = "one scale per layer is used for both k and v"
OTHER_MODEL = "the scales are of another model"


def check_model_type(path: Path, model_type: object, geometry: ModelGeometry) -> None:
    """Refuse a file that names another model type; None is not checked."""
    if model_type is not None and model_type != geometry.model_type:
        fault = f"model_type is {model_type!a:.60}, the model's is {geometry.model_type!r}"
        raise refusal(path, fault, hint=OTHER_MODEL)


def check_scales(
    path: Path,
    where: str,
    values: torch.Tensor,
    *,
    stored: str = "",
    smallest: float = SMALLEST_SCALE,
) -> None:
    """Refuse scales that are not finite numbers of at least `smallest`.

    `stored` is the dtype in the file, as safetensors spells it.
    """
    bad = values[~(values.isfinite() & (values >= smallest))]
    if not bad.numel():
        return
    first = float(bad.flatten()[0])
    if 0 < first < SMALLEST_SCALE:
        fault = f"{where}: {first:.4g} is too small for a scale"
        hint = (
            "the reciprocal of a scale under 2^-126 is infinite in fp32; calibrate this layer again"
        )
        raise refusal(path, fault, hint=hint)
    hint = "a scale is a finite number above zero; some engines use this one without an error"
    if stored == "F16" and not bool(bad.any()):
        hint = "a scale under 6e-8 is 0 in fp16; write it in fp32"
    raise refusal(path, f"{where}: {first} is not a scale", hint=hint)


def check_precision(path: Path, where: str, values: torch.Tensor, *, stored: str) -> None:
    """Refuse scales stored in fp16 and so small that their error is above 3 percent."""
    smallest = float(values.min())
    if stored == "F16" and 0 < smallest < _SMALLEST_KEPT_BY_FP16:
        fault = f"{where}: {smallest:.4g} is too small for a scale in fp16"
        hint = "numbers this small are 6e-8 apart in fp16; write the scale in fp32"
        raise refusal(path, fault, hint=hint)


def missing_layers(path: Path, missing: Sequence[int], *, of: int) -> ModelError:
    """Make the error for layers with a KV cache, `of` in all, that have no scale."""
    fault = f"there is no KV scale for {name_ranges(missing)} ({len(missing)} of {of} are missing)"
    return refusal(path, fault, hint="the scales are of another model, or of only part of one")


def join_ranks(
    path: Path,
    geometry: ModelGeometry,
    ranks: Mapping[int, Mapping[int, torch.Tensor]],
    *,
    files: Sequence[Path],
    fmt: Fp8Format | None,
    origin: CalibrationOrigin | None = None,
) -> ParsedScales:
    """Join one scale per rank and layer into [tp] for k and v of every layer.

    `ranks` maps rank -> layer index -> fp32 0-dim; layers without a KV cache are left out.
    """
    _check_ranks(path, ranks)
    _check_layers(path, geometry, ranks[0])
    values = {
        attention.site(role): torch.stack([ranks[rank][layer.index] for rank in range(len(ranks))])
        for layer, attention in geometry.attentions()
        if layer.index in ranks[0]
        for role in KV_ROLES
    }
    return ParsedScales(
        values=values,
        tp=len(ranks),
        fmt=fmt,
        origin=origin,
        files=tuple(files),
        notes=(ONE_FILLS_BOTH,),
    )


def fill_shared(
    geometry: ModelGeometry, reading: ParsedScales
) -> tuple[ParsedScales, dict[Site, ScaleSource]]:
    """Give layers that read another layer's cache its scale; return the sites that have it."""
    values = dict(reading.values)
    shared: dict[Site, ScaleSource] = {}
    differing: list[int] = []
    for layer, attention in geometry.attentions():
        producer = geometry.producer_of(attention)
        if producer is attention:
            continue
        for role in KV_ROLES:
            site, theirs = attention.site(role), values[producer.site(role)]
            if site not in values:
                values[site], shared[site] = theirs, ScaleSource.ABSENT
            elif torch.equal(values[site], theirs):
                shared[site] = ScaleSource.SHARED
            elif layer.index not in differing:
                differing.append(layer.index)
    note = (
        f"{name_ranges(differing)}: the scales differ from those of the layer whose cache is read; "
        "they are kept, but an engine that uses them misreads the cache"
    )
    notes = (*reading.notes, note) if differing else reading.notes
    return replace(reading, values=values, notes=notes), shared


def _check_ranks(path: Path, ranks: Mapping[int, Collection[int]]) -> None:
    missing = [rank for rank in range(len(ranks)) if rank not in ranks]
    if missing:
        fault = f"rank {missing[0]} is missing; there is only {_name_ranks(ranks)}"
        raise refusal(path, fault, hint="there must be ranks 0 to N-1, each with all layers")
    for rank, layers in ranks.items():
        differing = sorted(set(layers).symmetric_difference(ranks[0]))
        if differing:
            fault = f"{name_ranges(differing)}: in only one of rank 0 and rank {rank}"
            raise refusal(path, fault, hint="every rank must have all layers")


def _name_ranks(ranks: Collection[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {cut_list(sorted(ranks))}"


def _check_layers(path: Path, geometry: ModelGeometry, layers: Collection[int]) -> None:
    count = len(geometry.layers)
    extra = sorted(index for index in layers if index >= count)
    if extra:
        fault = f"there are scales for {name_ranges(extra)}, but the model has {count} layers"
        raise refusal(path, fault, hint=OTHER_MODEL)
    owners = geometry.owners()
    missing = [index for index in owners if index not in layers]
    if missing:
        raise missing_layers(path, missing, of=len(owners))
