"""Check the KV scales that a reader found, and join those of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.calibration.origin import CalibrationOrigin
from fp8calib.errors import ModelError, cut_list, name_ranges, refusal
from fp8calib.formats.dialect import ParsedScales
from fp8calib.model.geometry import KV_ROLES, ModelGeometry
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

_SMALLEST_KEPT_BY_FP16 = 2.0**-20
"""16 times the smallest fp16 number."""
_UNSET = 2.0**-40
"""llm-compressor leaves scales of q unset when it quantizes attention."""
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
    if not values.numel():
        return
    low, high = values.aminmax()  # NaN if there is one
    if smallest <= float(low) and float(high) < math.inf:
        return
    bad = values[~(values.isfinite() & (values >= smallest))]
    first = float(bad.flatten()[0])
    fault = f"{where}: {first} is not a scale"
    hint = "a scale is a finite number above zero; some engines use this one without an error"
    if 0 < first < SMALLEST_SCALE:
        fault = f"{where}: {first:.4g} is too small for a scale"
        hint = (
            "the reciprocal of a scale under 2^-126 is infinite in fp32; calibrate this layer again"
        )
    elif stored == "F16" and not bool(bad.any()):
        hint = "a scale under 6e-8 is 0 in fp16; write it in fp32"
    raise refusal(path, fault, hint=hint)


def is_query_scale(value: float) -> bool:
    """Tell whether a number may be a scale of q, rather than memory that a tool never set."""
    return _UNSET < value < 1 / _UNSET


def check_precision(path: Path, where: str, smallest: float, *, stored: str) -> None:
    """Refuse scales stored in fp16 if the error of the smallest is above 3 percent."""
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
    absent = [rank for rank in range(len(ranks)) if rank not in ranks]
    if absent:
        there = f"rank{'s' if len(ranks) > 1 else ''} {cut_list(sorted(ranks))}"
        fault = f"rank {absent[0]} is missing; there is only {there}"
        raise refusal(path, fault, hint="there must be ranks 0 to N-1, each with all layers")
    import torch  # noqa: PLC0415 -- `show` and `check` read no values with this module

    layers = ranks[0]
    for rank, own in ranks.items():
        if differing := sorted(set(own).symmetric_difference(layers)):
            fault = f"{name_ranges(differing)}: in only one of rank 0 and rank {rank}"
            raise refusal(path, fault, hint="every rank must have all layers")
    count, owners = len(geometry.layers), geometry.owners()
    if extra := sorted(index for index in layers if index >= count):
        fault = f"there are scales for {name_ranges(extra)}, but the model has {count} layers"
        raise refusal(path, fault, hint=OTHER_MODEL)
    if missing := [index for index in owners if index not in layers]:
        raise missing_layers(path, missing, of=len(owners))
    values = {
        attention.site(role): torch.stack([ranks[rank][layer.index] for rank in range(len(ranks))])
        for layer, attention in geometry.attentions()
        if layer.index in layers
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
