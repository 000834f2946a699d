"""Match what `quantize` would write in FP8 with the parameters of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from fp8calib.errors import VerificationError
from fp8calib.geometry.model_geometry import ModelGeometry
from fp8calib.model.load import LoadedModel
from fp8calib.model.topology.search import is_linear, is_transposed
from fp8calib.model.weight_source import WeightSource
from fp8calib.selection.matrices import Matrix
from fp8calib.selection.select import Selection
from fp8calib.verification.emulation.weights import (
    WeightParameter,
    find_parameters,
    is_of_decoder,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelectedWeights:
    """The weights of a text decoder that `quantize` would write in FP8."""

    groups: tuple[tuple[WeightParameter, ...], ...]
    """Those of linears and experts of the decoder layers, fused groups together."""
    others: tuple[WeightParameter, ...] = ()
    """Those whose inputs no hook sees: linears outside the layers, experts that multiply by their
    weights themselves."""
    missed: tuple[str, ...] = ()
    """Modules with weights of a layout that cannot be emulated."""
    refusal: str = ""
    """Why `quantize` does not write them."""


def select_weights(
    model: LoadedModel, geometry: ModelGeometry, source: WeightSource, selection: Selection
) -> SelectedWeights:
    """Find the parameters of `model` that are made from the selected tensors.

    `source` reads the checkpoint that `selection` was made for.

    Raises:
        ModelError: no linear is selected.
        VerificationError: a parameter is made from selected and other tensors.
    """
    if selection.refusal is not None and not (selection.quantized or selection.unsplit):
        raise selection.refusal
    found = _Found(model, source, selection)
    groups: dict[str, list[WeightParameter]] = defaultdict(list)
    for parameter in find_parameters(geometry, dict(model.named_modules())):
        matched = found.match(parameter)
        if matched is not None:
            groups[found.name_group(parameter)].append(matched)
    known = {parameter.name for group in groups.values() for parameter in group}
    others = {name: found.match_other(name) for name in found.list_others(known)}
    paths = (name.rpartition(".")[0] for name, parameter in others.items() if parameter is None)
    return SelectedWeights(
        groups=tuple(map(tuple, groups.values())),
        others=tuple(parameter for parameter in others.values() if parameter is not None),
        missed=tuple(dict.fromkeys(paths)),
        refusal="" if selection.refusal is None else selection.refusal.message,
    )


class _Found:
    """A selection, matched with the parameters of a model."""

    def __init__(self, model: LoadedModel, source: WeightSource, selection: Selection) -> None:
        self._model = model
        self._source = source
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
