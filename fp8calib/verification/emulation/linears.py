"""Emulate what an engine does with linears in FP8, planned ones and those of a checkpoint alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

from fp8calib.engines.numerics import Numerics
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.shapes import ModelGeometry, Role, Site
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.stored_weights import CopiedParameter, StoredWeights
from fp8calib.verification.emulation.weights import Requantized, WeightChange, find_rounded


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weights:
    """Weights in FP8 and the scaling of their inputs, as planned or as a checkpoint holds them."""

    weights: Requantized | StoredWeights
    """The rounded weights and their scales, before an engine loads them."""
    inputs: Mapping[str, Activation]
    """By parameter; of one without a site the inputs stay unquantized, as no hook sees them."""


def emulate_linears(
    linears: Iterable[Fp8Weights],
    geometry: ModelGeometry,
    numerics: Numerics,
    *,
    copied: Iterable[CopiedParameter] = (),
) -> Candidate:
    """Emulate an engine that loads these weights, and tensors `copied` beside them."""
    is_rounded = find_rounded(geometry, numerics)
    changes: list[WeightChange] = []
    quantizers: dict[Site, Quantizer] = {}
    for linear in linears:
        weights, inputs = linear.weights, linear.inputs
        has_groups = any(
            each.kind is InputScaling.GROUP and not each.is_mx for each in inputs.values()
        )
        rounds_blocks = has_groups and is_rounded(weights.parameters[0].name)
        changes.append(weights.loaded_by(numerics, rounds_blocks=rounds_blocks))
        for parameter in weights.parameters:
            if not parameter.sites:
                continue
            quantizer = _quantize_inputs(
                inputs[parameter.name],
                weights.fmt,
                numerics,
                is_rounded=is_rounded(parameter.name),
            )
            if quantizer is not None:
                sites = (Site(site.module, Role.INPUT) for site in parameter.sites)
                quantizers |= dict.fromkeys(sites, quantizer)
    return Candidate(quantizers=quantizers, weights=(*changes, *copied))


def _quantize_inputs(
    activation: Activation, fmt: Fp8Format, numerics: Numerics, *, is_rounded: bool
) -> Quantizer | None:
    """Quantize inputs as the engine does."""
    kind = activation.kind
    if ("mxfp8" if activation.is_mx else "fp8") in numerics.unmultiplied:
        return None
    if activation.is_mx:
        is_quantized = kind is InputScaling.GROUP or numerics.mx_inputs_always_quantized
        mx = Quantizer(fmt=fmt, scale=Granularity.GROUP, block=MX_BLOCK, power_of_two=True)
        return mx if is_quantized else None
    if kind is InputScaling.NONE:
        return None
    if kind is InputScaling.STATIC:
        assert activation.scale is not None  # noqa: S101 -- refused where it is missing
        return Quantizer(
            fmt=fmt,
            scale=torch.tensor(activation.scale),
            by_reciprocal=numerics.input_by_reciprocal,
        )
    is_group = kind is InputScaling.GROUP
    smallest = numerics.smallest_group_scale if is_group else numerics.smallest_dynamic_scale
    return Quantizer(
        fmt=fmt,
        scale=Granularity.GROUP if is_group else Granularity.TOKEN,
        smallest_scale=max(smallest, SMALLEST_SCALE),
        largest_amax=activation.upper_bound,
        by_reciprocal=numerics.token_by_reciprocal and not is_group,
        scale_by_reciprocal=numerics.token_scale_by_reciprocal and not is_group,
        power_of_two=is_rounded and is_group,
    )
