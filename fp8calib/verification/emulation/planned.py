"""Emulate what `quantize` plans to write in FP8: it is matched with the parameters of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from fp8calib.checkpoint.torch_dtypes import TORCH_DTYPES
from fp8calib.engines.numerics import Numerics
from fp8calib.errors import VerificationError, cut_list
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.shapes import Linear, ModelGeometry
from fp8calib.model.topology import is_linear, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import InputScaling, Scheme
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.select import Selection
from fp8calib.quantization.settings import PlanSettings
from fp8calib.verification.emulation.candidate import Candidate
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.linears import emulate_linears
from fp8calib.verification.emulation.weights import (
    Requantized,
    WeightParameter,
    explain_inputs,
    find_parameters,
    is_of_decoder,
)


def emulate_planned(
    settings: PlanSettings,
    selection: Selection,
    geometry: ModelGeometry,
    source: WeightSource,
    numerics: Numerics,
    *,
    fmt: Fp8Format = E4M3FN,
    scale_input: Callable[[Linear], torch.Tensor] | None = None,
) -> Candidate:
    """Emulate the parameters of a model that are made from the tensors that a plan quantizes.

    Fused groups of the decoder layers come first, then what no hook sees the inputs of: linears
    outside the layers, experts that multiply by their weights themselves. Weights that engines fuse
    share their scales. `selection`, made for the checkpoint of `source`, may also be one that
    `quantize` refuses; `scale_input` gives the static scale of a linear's input.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    model, matrices = source.model, defaultdict[str, list[Matrix]](list)
    for matrix in selection.quantized:
        matrices[matrix.source].append(matrix)
    selected = {*matrices, *selection.unsplit}
    linears = {linear.module: linear for _, linear in geometry.linears()}
    groups = defaultdict[str, list[WeightParameter]](list)
    schemes: dict[str, Scheme] = {}
    missed: dict[str, None] = {}
    known = {parameter.name: parameter for parameter in find_parameters(geometry, model)}
    others = (n for n, _ in model.named_parameters() if n not in known and is_of_decoder(n, model))
    for name in (*known, *others):
        tensors = source.tensor_names([name])
        if not (chosen := tensors & selected):
            continue
        if chosen != tensors:
            raise VerificationError(
                f"{name} would be FP8 in part: `quantize` writes {min(chosen)} in FP8, and not "
                f"{min(tensors - chosen)}"
            )
        parameter = known.get(name) or _describe_other(name, source, matrices)
        if parameter is None:
            missed[name.rpartition(".")[0]] = None
            continue
        # all matrices of a weight have one scheme, as engines need it
        first = matrices.get(min(chosen), ())
        schemes[name] = settings.scheme_of(first[0].module if first else min(chosen))
        inside = [matrix for tensor in chosen for matrix in matrices.get(tensor, ())]
        parts = max(1, len(inside) // max(1, parameter.num_experts))
        # A per-tensor scale is shared by what is fused; experts have their own, and projections
        # that the checkpoint stores in one tensor share that of the tensor.
        is_whole = name in known and len(inside) == 1 and not parameter.num_experts
        group = inside[0].fused_group if is_whole else name
        groups[group].append(replace(parameter, num_parts=parts))

    def quantize(group: Sequence[WeightParameter]) -> Requantized:
        scheme, inputs = schemes[group[0].name], {}
        for parameter in group:
            scales = []
            if scale_input is not None and scheme.has_static_inputs:
                scales = [float(scale_input(linears[site.module])) for site in parameter.sites]
            # experts share the largest
            scale = max(scales, default=None)
            inputs[parameter.name] = Activation(kind=scheme.inputs, is_mx=scheme.is_mx, scale=scale)
        return Requantized(
            parameters=tuple(group),
            quantizer=Quantizer(
                fmt=fmt,
                scale=scheme.weights,
                block=scheme.block,
                power_of_two=scheme.has_power_of_two_scales,
                smallest_scale=SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE,
            ),
            stored=source if any(_is_rounded(each.name, source) for each in group) else None,
            inputs=inputs,
        )

    weights = [quantize(group) for group in groups.values()]
    unseen = sorted(
        parameter.name
        for group in groups.values()
        for parameter in group
        if not parameter.sites and schemes[parameter.name].inputs is not InputScaling.NONE
    )
    notes = []
    if selection.refusal is not None:
        notes.append(f"`quantize` does not write this model: {selection.refusal.message}")
    if unseen:
        notes.append(explain_inputs(unseen))
    if missed:
        notes.append(f"not quantized here, though an engine may: {cut_list(list(missed), 1)}")
    return emulate_linears(weights, fmt, geometry, numerics, notes=notes)


def _describe_other(
    name: str, source: WeightSource, matrices: dict[str, list[Matrix]]
) -> WeightParameter | None:
    """Describe a parameter that belongs to no linear of a layer; None if that is not known."""
    module = source.model.get_submodule(name.rpartition(".")[0])
    plain = WeightParameter(name=name)
    if is_linear(module):
        return replace(plain, is_transposed=is_transposed(module))
    inside = matrices.get(source.single_tensors.get(name, ""), ())
    positions = [matrix.position for matrix in inside if matrix.position is not None]
    if not positions:
        return None
    num_experts = 1 + max(position.expert for position in positions)
    return replace(plain, is_transposed=positions[0].is_transposed, num_experts=num_experts)


def _is_rounded(name: str, source: WeightSource) -> bool:
    """Tell whether the dtype of the model lacks numbers of the checkpoint's."""
    own = source.model.get_parameter(name).dtype
    entries = (source.source.tensors[each] for each in source.tensor_names([name]))
    return any(torch.promote_types(TORCH_DTYPES[entry.dtype], own) != own for entry in entries)
