"""The RFC's compound scale: that of an int4 weight times that of FP8, which is 1.

An int4 weight is computed with as FP8: its integers become FP8 codes under an FP8 scale, and what
the JSON says of the layer multiplies codes to real numbers at once, `scale_int4 * scale_fp8`. With
a scale of 1 (any other power of two would do) each integer from -8 to 7 is an FP8 number, for it
has three significant bits where e4m3fn and e4m3fnuz keep four: the FP8 weight is the int4 weight,
number for number, and the product is `scale_int4` without a rounding. `amax / fmt.max`, the rule of
other weights, would put most integers between two codes (3 x 56 = 168 lies between 160 and 176).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fp8calib.errors import ExportError
from fp8calib.fp8.amax import tensor_amax
from fp8calib.geometry.model_geometry import Linear, Part
from fp8calib.geometry.sites import Role, Site
from fp8calib.geometry.tensor_parallel import owned_channels, owned_rows
from fp8calib.model.projections import LinearWeight
from fp8calib.scales.compute import Scale, ScaleSource, ScaleTable, scale_of

FP8_SCALE = 1.0


def adopt_scales(
    table: ScaleTable, weights: Iterable[LinearWeight], spread: Iterable[LinearWeight]
) -> ScaleTable:
    """Give every weight the compound scale of its int4 source in the place of the table's own.

    What the source has not quantized takes its amax, as weights do, and where it is all zeros on a
    rank the scale that the table has for it.

    Args:
        table: scales of all projections.
        weights: all that the table speaks of, in real numbers.
        spread: the int4 scale of every element of these weights, in the same order, 0 where it is
            not quantized (`int4_source.ScaleSpread`).

    Raises:
        ExportError: a weight is of another shape than the table's model has, joined of parts with
            several scales, or not finite.
    """
    scales = dict(table.scales)
    for weight, shared in zip(weights, spread, strict=True):
        _check_shape(weight)
        for part in weight.linear.parts:
            site = Site(weight.linear.logical(part, weight.expert), Role.WEIGHT)
            int4 = _find_scale(site, part, shared.values)
            scales[site] = (
                Scale(values=(int4 * FP8_SCALE).expand(table.tp), source=ScaleSource.OBSERVED)
                if bool(int4)
                else _measure(table, site, part, weight)
            )
    return replace(table, scales=scales)


def _check_shape(weight: LinearWeight) -> None:
    linear = weight.linear
    expected = (linear.out_features, linear.in_features)
    if weight.values.shape != expected:
        raise ExportError(
            f"{linear.module} is {list(weight.values.shape)} in the checkpoint and "
            f"{list(expected)} in the calibrated model",
            hint="name the int4 checkpoint of the model that was calibrated",
        )


def _find_scale(site: Site, part: Part, spread: torch.Tensor) -> torch.Tensor:
    """Find the int4 scale that all of a projection shares: fp32 [], 0 where it has none."""
    is_one_number = not any(spread.stride())
    own = spread[:1] if is_one_number else spread[part.rows(range(part.count))]
    low, high = torch.aminmax(own)
    if not torch.equal(low, high):
        raise ExportError(
            f"{site} is joined of weights with several int4 scales ({float(low):.6g} to "
            f"{float(high):.6g}), and the RFC has one for it",
            hint="name the unquantized model",
        )
    return high


def _measure(table: ScaleTable, site: Site, part: Part, weight: LinearWeight) -> Scale:
    """Make the scales of a projection that is not quantized from its own magnitudes."""
    linear, kept = weight.linear, table.scales[site]
    amax = torch.stack(
        [_find_amax(linear, part, weight.values, table.tp, rank) for rank in range(table.tp)]
    )
    if not bool(amax.isfinite().all()):
        raise ExportError(f"{site} holds NaN or infinity", hint="download the checkpoint again")
    is_there = amax > 0
    return Scale(
        values=torch.where(is_there, scale_of(amax, table.fmt), kept.values),
        source=ScaleSource.OBSERVED if bool(is_there.all()) else ScaleSource.ALL_ZERO,
        is_substitute=not bool(is_there.any()),
    )


def _find_amax(
    linear: Linear, part: Part, values: torch.Tensor, tp: int, rank: int
) -> torch.Tensor:
    channels = owned_channels(linear, tp, rank)
    own = values[owned_rows(linear, part, tp, rank), channels.start : channels.stop]
    return tensor_amax(own)
