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
from fp8calib.numerics.schemes import InputScaling
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
    outside the layers, experts that multiply by their weights themselves.

    Args:
        settings: the plan's; weights that engines fuse share their scales.
        selection: the plan's, which may also be one that `quantize` refuses.
        geometry: of the model.
        source: reads the checkpoint that `selection` was made for; its model may be without
            weights.
        numerics: how the engine computes that loads the checkpoint.
        fmt: of the weights and their inputs.
        scale_input: gives the static scale of a linear's input; None where no engine needs one.

    Raises:
        ModelError: no linear is selected.
        VerificationError: a parameter is made from selected and other tensors.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    model = source.model
    plan = _Plan(source, settings, selection)
    groups: dict[str, list[WeightParameter]] = defaultdict(list)
    for parameter in find_parameters(geometry, model):
        if plan.list_tensors(parameter.name):
            groups[plan.name_group(parameter)].append(parameter)
    known = {parameter.name for group in groups.values() for parameter in group}
    missed: dict[str, None] = {}
    for name, _ in model.named_parameters():
        if name not in known and is_of_decoder(name, model) and plan.list_tensors(name):
            if (other := plan.describe_other(name)) is None:
                missed[name.rpartition(".")[0]] = None
            else:
                groups[name] = [other]
    linears = {linear.module: linear for _, linear in geometry.linears()}

    def scale(parameter: WeightParameter) -> float | None:
        """Give the static scale of the inputs; experts share the largest."""
        if scale_input is None:
            return None
        scales = (float(scale_input(linears[site.module])) for site in parameter.sites)
        return max(scales, default=None)

    weights = [plan.quantize(group, fmt, scale) for group in groups.values()]
    unseen = sorted(
        parameter.name
        for each in weights
        for parameter in each.parameters
        if not parameter.sites and each.inputs[parameter.name].kind is not InputScaling.NONE
    )
    notes = []
    if selection.refusal is not None:
        notes.append(f"`quantize` does not write this model: {selection.refusal.message}")
    if unseen:
        notes.append(explain_inputs(unseen))
    if missed:
        notes.append(f"not quantized here, though an engine may: {cut_list(list(missed), 1)}")
    return emulate_linears(weights, fmt, geometry, numerics, notes=notes)


class _Plan:
    """A plan, matched with the parameters of a model."""

    def __init__(self, source: WeightSource, settings: PlanSettings, selection: Selection) -> None:
        self._source = source
        self._settings = settings
        self._matrices: dict[str, list[Matrix]] = defaultdict(list)
        for matrix in selection.quantized:
            self._matrices[matrix.source].append(matrix)
        self._selected = {*self._matrices, *selection.unsplit}

    def list_tensors(self, name: str) -> frozenset[str]:
        """List the tensors of a parameter; none where they are not selected."""
        tensors = self._source.tensor_names([name])
        selected = tensors & self._selected
        if selected and selected != tensors:
            raise VerificationError(
                f"{name} would be FP8 in part: `quantize` writes {sorted(selected)[0]} in FP8, and "
                f"not {sorted(tensors - selected)[0]}"
            )
        return selected

    def _list_matrices(self, name: str) -> list[Matrix]:
        return [each for tensor in self.list_tensors(name) for each in self._matrices[tensor]]

    def name_group(self, parameter: WeightParameter) -> str:
        """Name the weights that share one per-tensor scale with this one; experts have their own.

        Projections that the checkpoint stores in one tensor share that of the tensor.
        """
        matrices = self._list_matrices(parameter.name)
        is_whole = len(matrices) == 1 and not parameter.num_experts
        return matrices[0].fused_group if is_whole else parameter.name

    def describe_other(self, name: str) -> WeightParameter | None:
        """Describe a parameter that belongs to no linear of a layer; None if that is not known."""
        module = self._source.model.get_submodule(name.rpartition(".")[0])
        plain = WeightParameter(name=name, sites=(), is_transposed=False, num_experts=0)
        if is_linear(module):
            return replace(plain, is_transposed=is_transposed(module))
        inside = self._matrices.get(self._source.single_tensors.get(name, ""), ())
        positions = [matrix.position for matrix in inside if matrix.position is not None]
        if not positions:
            return None
        num_experts = 1 + max(position.expert for position in positions)
        return replace(plain, is_transposed=positions[0].is_transposed, num_experts=num_experts)

    def quantize(
        self,
        group: Sequence[WeightParameter],
        fmt: Fp8Format,
        scale_inputs: Callable[[WeightParameter], float | None],
    ) -> Requantized:
        """Describe how weights that share their per-tensor scale are quantized."""
        # All matrices of a weight have one scheme, as engines need it.
        tensor = min(self.list_tensors(group[0].name))
        modules = [matrix.module for matrix in self._matrices[tensor]]
        scheme = self._settings.scheme_of(modules[0] if modules else tensor)
        return Requantized(
            parameters=tuple(map(self._count_parts, group)),
            quantizer=Quantizer(
                fmt=fmt,
                scale=scheme.weights,
                block=scheme.block,
                power_of_two=scheme.has_power_of_two_scales,
                smallest_scale=SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE,
            ),
            stored=self._source if any(map(self._is_rounded, group)) else None,
            inputs={
                parameter.name: Activation(
                    kind=scheme.inputs,
                    is_mx=scheme.is_mx,
                    scale=scale_inputs(parameter) if scheme.has_static_inputs else None,
                )
                for parameter in group
            },
        )

    def _count_parts(self, parameter: WeightParameter) -> WeightParameter:
        count = len(self._list_matrices(parameter.name)) // max(1, parameter.num_experts)
        return replace(parameter, num_parts=max(1, count))

    def _is_rounded(self, parameter: WeightParameter) -> bool:
        """Tell whether the dtype of the model lacks numbers of the checkpoint's."""
        own = self._source.model.get_parameter(parameter.name).dtype
        entries = (self._source.source.tensors[each] for each in self.list_tensors(parameter.name))
        return any(torch.promote_types(TORCH_DTYPES[entry.dtype], own) != own for entry in entries)
