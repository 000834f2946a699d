"""Check the KV scales that a reader found."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fp8calib.errors import ModelError, name_ranges, refusal
from fp8calib.model.geometry import ModelGeometry
from fp8calib.numerics.formats import SMALLEST_SCALE

if TYPE_CHECKING:  # scales are recognised without torch
    import torch

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


def missing_layers(path: Path, missing: Sequence[int], *, of: int) -> ModelError:
    """Make the error for layers with a KV cache, `of` in all, that have no scale."""
    fault = f"there is no KV scale for {name_ranges(missing)} ({len(missing)} of {of} are missing)"
    return refusal(path, fault, hint="the scales are of another model, or of only part of one")
