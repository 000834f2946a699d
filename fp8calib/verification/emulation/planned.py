"""Match what `quantize` plans to write in FP8 with the parameters of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from fp8calib.checkpoint.tensor_file import TORCH_DTYPES
from fp8calib.errors import VerificationError
from fp8calib.formats.fp8.quantization_config import Activation
from fp8calib.model.shapes import Linear, ModelGeometry
from fp8calib.model.topology.search import is_linear, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.numerics.formats import E4M3FN, SMALLEST_EXPONENT, SMALLEST_SCALE, Fp8Format
from fp8calib.numerics.schemes import Scheme
from fp8calib.quantization.matrices import Matrix
from fp8calib.quantization.plan import PlanSettings
from fp8calib.quantization.select import Selection
from fp8calib.verification.emulation.fake_quantize import Quantizer
from fp8calib.verification.emulation.linears import Fp8Weights
from fp8calib.verification.emulation.weights import (
    Requantized,
    WeightParameter,
    find_parameters,
    is_of_decoder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWeights:
    """The weights of a text decoder that `quantize` would write in FP8."""

    weights: tuple[Fp8Weights, ...]
    """Fused groups of the decoder layers, then those whose inputs no hook sees: linears outside the
    layers, experts that multiply by their weights themselves."""
    missed: tuple[str, ...] = ()
    """Modules with weights of a layout that cannot be emulated."""
    refusal: str = ""
    """Why `quantize` does not write them."""


def find_planned(
    settings: PlanSettings,
    selection: Selection,
    geometry: ModelGeometry,
    source: WeightSource,
    *,
    fmt: Fp8Format = E4M3FN,
    scale_input: Callable[[Linear], torch.Tensor] | None = None,
) -> PlannedWeights:
    """Find the parameters of a model that are made from the tensors that a plan quantizes.

    Args:
        settings: the plan's; weights that engines fuse share their scales.
        selection: the plan's, which may also be one that `quantize` refuses.
        geometry: of the model.
        source: reads the checkpoint that `selection` was made for; its model may be without
            weights.
        fmt: of the weights and their inputs.
        scale_input: gives the static scale of a linear's input; None where no engine needs one.

    Raises:
        ModelError: no linear is selected.
        VerificationError: a parameter is made from selected and other tensors.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    found = _Found(source, settings, selection)
    groups: dict[str, list[WeightParameter]] = defaultdict(list)
    linears = {linear.module: linear for _, linear in geometry.linears()}
    for parameter in find_parameters(linears.values(), dict(source.model.named_modules())):
        matched = found.match(parameter)
        if matched is not None:
            groups[found.name_group(parameter)].append(matched)
    known = {parameter.name for group in groups.values() for parameter in group}
    others = {name: found.match_other(name) for name in found.list_others(known)}
    paths = (name.rpartition(".")[0] for name, parameter in others.items() if parameter is None)

    def scale_inputs(parameter: WeightParameter) -> float | None:
        if scale_input is None:
            return None
        scales = (float(scale_input(linears[site.module])) for site in parameter.sites)
        return max(scales, default=None)

    alone = ([parameter] for parameter in others.values() if parameter is not None)
    return PlannedWeights(
        weights=tuple(
            found.plan_group(group, fmt, scale_inputs) for group in (*groups.values(), *alone)
        ),
        missed=tuple(dict.fromkeys(paths)),
        refusal="" if selection.refusal is None else selection.refusal.message,
    )


class _Found:
    """A plan, matched with the parameters of a model."""

    def __init__(self, source: WeightSource, settings: PlanSettings, selection: Selection) -> None:
        self._model = source.model
        self._source = source
        self._settings = settings
        self._matrices: dict[str, list[Matrix]] = defaultdict(list)
        for matrix in selection.quantized:
            self._matrices[matrix.source].append(matrix)
        self._selected = {*self._matrices, *selection.unsplit}

    def list_others(self, known: set[str]) -> Iterator[str]:
        """List the other parameters of the text decoder that are made from selected tensors."""
        for name, _ in self._model.named_parameters():
            if name not in known and is_of_decoder(name, self._model) and self._list_tensors(name):
                yield name

    def match(self, parameter: WeightParameter) -> WeightParameter | None:
        """Add how many projections the weight of a linear holds; None if it is not selected."""
        tensors = self._list_tensors(parameter.name)
        if not tensors:
            return None
        count = sum(len(self._matrices[tensor]) for tensor in tensors)
        return replace(parameter, num_parts=max(1, count // max(1, parameter.num_experts)))

    def name_group(self, parameter: WeightParameter) -> str:
        """Name the weights that share one per-tensor scale with this one; experts have their own.

        Projections that the checkpoint stores in one tensor share that of the tensor.
        """
        tensors = self._list_tensors(parameter.name)
        matrices = [matrix for tensor in tensors for matrix in self._matrices[tensor]]
        is_whole = len(matrices) == 1 and not parameter.num_experts
        return matrices[0].fused_group if is_whole else parameter.name

    def plan_group(
        self,
        group: Sequence[WeightParameter],
        fmt: Fp8Format,
        scale_inputs: Callable[[WeightParameter], float | None],
    ) -> Fp8Weights:
        """Describe how weights that share their per-tensor scale are quantized."""
        scheme = self.find_scheme(group[0])
        return Fp8Weights(
            weights=Requantized(
                parameters=tuple(group),
                quantizer=Quantizer(
                    fmt=fmt,
                    scale=scheme.weights,
                    block=scheme.block,
                    power_of_two=scheme.has_power_of_two_scales,
                    smallest_scale=SMALLEST_EXPONENT if scheme.is_mx else SMALLEST_SCALE,
                ),
                stored=self._source if any(map(self._is_rounded, group)) else None,
            ),
            inputs={
                parameter.name: Activation(
                    kind=scheme.inputs,
                    is_mx=scheme.is_mx,
                    scale=scale_inputs(parameter) if scheme.has_static_inputs else None,
                )
                for parameter in group
            },
        )

    def _is_rounded(self, parameter: WeightParameter) -> bool:
        """Tell whether the dtype of the model lacks numbers of the checkpoint's."""
        own = self._model.get_parameter(parameter.name).dtype
        stored = (self._source.source.tensors[name] for name in self._list_tensors(parameter.name))
        return any(torch.promote_types(TORCH_DTYPES[entry.dtype], own) != own for entry in stored)

    def find_scheme(self, parameter: WeightParameter) -> Scheme:
        """Find the scheme of a weight; all of its matrices have one, as engines need it."""
        tensor = min(self._list_tensors(parameter.name))
        modules = [matrix.module for matrix in self._matrices[tensor]]
        return self._settings.schemes.of(modules[0] if modules else tensor)

    def match_other(self, name: str) -> WeightParameter | None:
        """Describe a parameter that belongs to no linear of a layer; None if that is not known."""
        module = self._model.get_submodule(name.rpartition(".")[0])
        if is_linear(module):
            plain = WeightParameter(
                name=name, sites=(), is_transposed=is_transposed(module), num_experts=0
            )
            return self.match(plain)
        tensor = self._source.single_tensors.get(name, "")
        inside: Sequence[Matrix] = self._matrices.get(tensor, ())
        positions = [matrix.position for matrix in inside if matrix.position is not None]
        if not positions:
            return None
        stack = WeightParameter(
            name=name,
            sites=(),
            is_transposed=positions[0].is_transposed,
            num_experts=1 + max(position.expert for position in positions),
        )
        return self.match(stack)

    def _list_tensors(self, name: str) -> frozenset[str]:
        """List the tensors of a parameter; none where they are not selected."""
        tensors = self._source.tensor_names([name])
        selected = tensors & self._selected
        if selected and selected != tensors:
            raise VerificationError(
                f"{name} would be FP8 in part: `quantize` writes {sorted(selected)[0]} in FP8, and "
                f"not {sorted(tensors - selected)[0]}"
            )
        return selected
