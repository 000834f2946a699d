"""The RFC's compound scale: the scale of an int4 weight times an FP8 scale, which is 1.

For FP8 arithmetic the integers of an int4 weight become FP8 codes with an FP8 scale; the layer's
scale in the JSON, `scale_int4 * scale_fp8`, converts codes to real numbers in one step. With an FP8
scale of 1 (any power of two would do) each integer from -8 to 7 is an FP8 number: it has three
significant bits, and e4m3fn and e4m3fnuz keep four. So the FP8 weight equals the int4 weight, and
the product is `scale_int4` without rounding. `amax / fmt.max`, the rule of other weights, would put
most integers between two codes (3 x 56 = 168 is between 160 and 176).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from fp8calib.errors import ExportError, ModelError
from fp8calib.formats.table import Scale, ScaleSource, ScaleTable
from fp8calib.model.projections import LinearWeight
from fp8calib.model.shapes import Part, Role, Site
from fp8calib.numerics.amax import tensor_amax
from fp8calib.numerics.from_amax import scale_of

FP8_SCALE = 1.0


def adopt_scales(
    table: ScaleTable, weights: Iterable[LinearWeight], spread: Iterable[LinearWeight]
) -> ScaleTable:
    """Replace the scale of every weight by the compound scale of its int4 source.

    An unquantized weight of the source gets a scale from its amax; if it is all zeros on a rank,
    it keeps the scale of the table.

    Args:
        table: scales of all projections.
        weights: all weights of the table, in real numbers.
        spread: the int4 scale of every element of these weights, in the same order; 0 if the weight
            is not quantized (`ScaleSpread`).

    Raises:
        ModelError: a weight has another shape than in the table's model.
        ExportError: a weight is joined from parts with several scales, or is not finite.
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
        raise ModelError(
            f"{linear.module} is {list(weight.values.shape)} in the checkpoint and "
            f"{list(expected)} in the calibrated model",
            hint="name the int4 checkpoint of the model that was calibrated",
        )


def _find_scale(site: Site, part: Part, spread: torch.Tensor) -> torch.Tensor:
    """Find the int4 scale of a projection: fp32 [], 0 if it is not quantized."""
    is_one_number = not any(spread.stride())
    own = spread[:1] if is_one_number else spread[part.rows(range(part.count))]
    low, high = torch.aminmax(own)
    if not torch.equal(low, high):
        raise ExportError(
            f"{site} is joined from weights with several int4 scales ({float(low):.6g} to "
            f"{float(high):.6g}), but the RFC has one scale for it",
            hint="name the unquantized model",
        )
    return high


def _measure(table: ScaleTable, site: Site, part: Part, weight: LinearWeight) -> Scale:
    """Compute the scales of an unquantized projection from its magnitudes."""
    ranks = range(table.tp)
    amax = torch.stack([tensor_amax(weight.cut(part, table.tp, rank)) for rank in ranks])
    if not bool(amax.isfinite().all()):
        raise ExportError(f"{site} contains NaN or infinity", hint="download the checkpoint again")
    is_there = amax > 0
    return Scale(
        values=torch.where(is_there, scale_of(amax, table.fmt), table.scales[site].values),
        source=ScaleSource.OBSERVED if bool(is_there.all()) else ScaleSource.ALL_ZERO,
        is_substitute=not bool(is_there.any()),
    )
