"""Emulate what an engine does with linears in FP8, planned ones and those of a checkpoint alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from fp8calib.engines.numerics import Numerics
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.module_paths import name_fused_group
from fp8calib.model.shapes import Linear, ModelGeometry, Role, Site
from fp8calib.numerics.formats import SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import MX_BLOCK, Granularity, InputScaling
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.weights import Requantized, WeightChange


def emulate_linears(
    linears: Iterable[WeightChange],
    fmt: Fp8Format,
    geometry: ModelGeometry,
    numerics: Numerics,
    *,
    copied: Iterable[WeightChange] = (),
    notes: Iterable[str] = (),
) -> Candidate:
    """Emulate an engine that loads FP8 weights of one format, and tensors `copied` beside them.

    The inputs of a weight without a site stay in 16 bits, as no hook sees them.
    """
    is_rounded = _find_rounded(geometry, numerics)
    changes: list[WeightChange] = []
    quantizers: dict[Site, Quantizer] = {}
    for change in linears:
        first = change.parameters[0]
        kinds = {each.kind for each in change.inputs.values() if not each.is_mx}
        again, passes = None, False
        if InputScaling.GROUP in kinds and is_rounded(first.name):
            again = Quantizer(fmt=fmt, scale=Granularity.BLOCK, power_of_two=True)
        if isinstance(change, Requantized):  # `Fp8Checkpoint` does this for stored weights
            is_expert_down = first.num_experts > 0 and len(first.sites) == 1
            is_per_tensor = change.quantizer.scale is Granularity.TENSOR
            passes = numerics.weights_through_float16 and is_per_tensor and not is_expert_down
        changes.append(replace(change, again=again, through_float16=passes))
        for parameter in (each for each in change.parameters if each.sites):
            quantizer = _quantize_inputs(
                *(change.inputs[parameter.name], fmt, numerics),
                is_rounded=is_rounded(parameter.name),
            )
            if quantizer is not None:
                sites = (Site(site.module, Role.INPUT) for site in parameter.sites)
                quantizers |= dict.fromkeys(sites, quantizer)
    is_mx = any(each.power_of_two and each.block == MX_BLOCK for each in quantizers.values())
    if is_mx and numerics.mx_inputs_always_quantized:
        about_mx = "inputs of MXFP8 are quantized as on Blackwell and gfx95x; on other GPUs "
        notes = (f"{about_mx}{numerics.name} leaves them in 16 bits", *notes)
    return Candidate(quantizers=quantizers, weights=(*changes, *copied), notes=tuple(notes))


def _find_rounded(geometry: ModelGeometry, numerics: Numerics) -> Callable[[str], bool]:
    """Find for which parameters the engine rounds scales of blocks and groups to powers of two.

    A parameter that is not of a linear of the geometry is assumed to have sizes that fit.
    """
    if not numerics.group_scales_power_of_two or geometry.checkpoint_dtype == "float16":
        return lambda _name: False
    fused: dict[str, list[Linear]] = defaultdict(list)
    for _, linear in geometry.linears():
        if not linear.num_experts:
            fused[name_fused_group(linear.module)].append(linear)
    rows_of, columns_of = numerics.power_of_two_sizes
    kept = {
        linear.weight_name
        for members in fused.values()
        for linear in members
        if sum(each.out_features for each in members) % rows_of or linear.in_features % columns_of
    }
    return lambda name: name not in kept


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
